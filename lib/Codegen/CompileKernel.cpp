//===- CompileKernel.cpp - a kernel as machine code -----------------------===//
//
// No flag allows LLVM to change an operation's rounding: no fast-math, and
// nothing is contracted but the multiply-adds that the kernel spells out. Loops
// are not vectorised again, and not turned into calls of a C library.
//
//===----------------------------------------------------------------------===//
#include "Libdevice.h"
#include "LinkImage.h"
#include "fsdp/Plan/KernelAbi.h"

#include "mlir/Conversion/ArithToLLVM/ArithToLLVM.h"
#include "mlir/Conversion/ControlFlowToLLVM/ControlFlowToLLVM.h"
#include "mlir/Conversion/FuncToLLVM/ConvertFuncToLLVMPass.h"
#include "mlir/Conversion/MathToLLVM/MathToLLVM.h"
#include "mlir/Conversion/ReconcileUnrealizedCasts/ReconcileUnrealizedCasts.h"
#include "mlir/Conversion/SCFToControlFlow/SCFToControlFlow.h"
#include "mlir/Conversion/VectorToLLVM/ConvertVectorToLLVMPass.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/ControlFlow/IR/ControlFlow.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Target/LLVMIR/Dialect/Builtin/BuiltinToLLVMIRTranslation.h"
#include "mlir/Target/LLVMIR/Dialect/LLVMIR/LLVMToLLVMIRTranslation.h"
#include "mlir/Target/LLVMIR/Export.h"
#include "mlir/Transforms/Passes.h"
#include "llvm/ADT/SmallString.h"
#include "llvm/IR/LLVMContext.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/Support/raw_ostream.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/Target/TargetOptions.h"

using namespace mlir;
using namespace mlir::fsdp;
namespace plan = ::fsdp::plan;

void mlir::fsdp::registerKernelDialects(DialectRegistry &registry) {
  registry.insert<arith::ArithDialect, cf::ControlFlowDialect,
                  func::FuncDialect, LLVM::LLVMDialect, math::MathDialect,
                  scf::SCFDialect, vector::VectorDialect>();
  registerBuiltinDialectTranslation(registry);
  registerLLVMDialectTranslation(registry);
}

static LogicalResult lowerToLLVM(ModuleOp module) {
  PassManager pm(module.getContext());
  pm.addPass(createCSEPass());
  pm.addPass(createSCFToControlFlowPass());
  pm.addPass(createConvertVectorToLLVMPass());
  pm.addPass(createConvertMathToLLVMPass());
  pm.addPass(createArithToLLVMConversionPass());
  pm.addPass(createConvertControlFlowToLLVMPass());
  pm.addPass(createConvertFuncToLLVMPass());
  pm.addPass(createReconcileUnrealizedCastsPass());
  return pm.run(module);
}

static std::unique_ptr<llvm::TargetMachine>
createMachine(const KernelTarget &target, std::string &error) {
  static const bool initialised = [] {
    LLVMInitializeNVPTXTargetInfo();
    LLVMInitializeNVPTXTarget();
    LLVMInitializeNVPTXTargetMC();
    LLVMInitializeNVPTXAsmPrinter();
    LLVMInitializeX86TargetInfo();
    LLVMInitializeX86Target();
    LLVMInitializeX86TargetMC();
    LLVMInitializeX86AsmPrinter();
    return true;
  }();
  (void)initialised;
  llvm::Triple triple(target.isGpu() ? "nvptx64-nvidia-cuda"
                                     : "x86_64-unknown-linux-gnu");
  const llvm::Target *found = llvm::TargetRegistry::lookupTarget(triple, error);
  if (!found)
    return nullptr;
  llvm::TargetOptions options;
  options.AllowFPOpFusion = llvm::FPOpFusion::Strict;
  return std::unique_ptr<llvm::TargetMachine>(found->createTargetMachine(
      triple, target.name, "", options, llvm::Reloc::PIC_,
      llvm::CodeModel::Small, llvm::CodeGenOptLevel::Default));
}

static void optimise(llvm::Module &module, llvm::TargetMachine &machine) {
  llvm::PipelineTuningOptions tuning;
  tuning.LoopVectorization = false;
  tuning.SLPVectorization = false;
  tuning.LoopUnrolling = false;
  llvm::PassBuilder builder(&machine, tuning);
  llvm::LoopAnalysisManager loops;
  llvm::FunctionAnalysisManager functions;
  llvm::CGSCCAnalysisManager components;
  llvm::ModuleAnalysisManager modules;
  builder.registerModuleAnalyses(modules);
  builder.registerCGSCCAnalyses(components);
  builder.registerFunctionAnalyses(functions);
  builder.registerLoopAnalyses(loops);
  builder.crossRegisterProxies(loops, functions, components, modules);
  builder.buildPerModuleDefaultPipeline(llvm::OptimizationLevel::O2)
      .run(module, modules);
}

FailureOr<MachineCode> mlir::fsdp::compileKernel(LoweredKernel kernel,
                                                 const KernelTarget &target) {
  ModuleOp module = *kernel.module;
  std::string name =
      (*module.getOps<func::FuncOp>().begin()).getSymName().str();
  auto fail = [&](const llvm::Twine &why) {
    return emitError(module.getLoc())
           << "kernel " << module.getSymName().value_or(name) << " for "
           << target.name << ": " << why;
  };
  llvm::LLVMContext context;
  std::unique_ptr<llvm::Module> code;
  if (succeeded(lowerToLLVM(module)))
    code = translateModuleToLLVMIR(module, context, name);
  if (!code)
    return fail("no LLVM IR");

  std::string error;
  std::unique_ptr<llvm::TargetMachine> machine = createMachine(target, error);
  if (!machine)
    return fail(error);
  code->setTargetTriple(machine->getTargetTriple());
  code->setDataLayout(machine->createDataLayout());
  for (llvm::Function &function : *code) {
    function.addFnAttr("no-builtins");
    if (!target.isGpu())
      function.addFnAttr("prefer-vector-width",
                         std::to_string(32 * target.width));
    function.addFnAttr(llvm::Attribute::NoUnwind);
    if (function.getName() == plan::kGpuEntry)
      function.setCallingConv(llvm::CallingConv::PTX_Kernel);
  }
  if (target.isGpu())
    if (llvm::Error why = linkLibdevice(*code))
      return fail(llvm::toString(std::move(why)));
  optimise(*code, *machine);

  llvm::SmallVector<char, 0> object;
  llvm::raw_svector_ostream os(object);
  llvm::legacy::PassManager passes;
  if (machine->addPassesToEmitFile(passes, os, nullptr,
                                   target.isGpu()
                                       ? llvm::CodeGenFileType::AssemblyFile
                                       : llvm::CodeGenFileType::ObjectFile))
    return fail("no object file");
  passes.run(*code);
  if (target.isGpu())
    return MachineCode{os.str().str(), 0};
  auto image = linkImage(llvm::MemoryBufferRef(os.str(), "kernel"), name);
  if (!image)
    return fail(llvm::toString(image.takeError()));
  return std::move(*image);
}
