//===- PlanEmitter.h - a module becomes a plan ----------------------------===//
#ifndef FSDP_LIB_TRANSFORMS_LOWER_PLANEMITTER_H
#define FSDP_LIB_TRANSFORMS_LOWER_PLANEMITTER_H

#include "SourceTables.h"

#include "fsdp/Transforms/EmitPlan.h"
#include "fsdp/Transforms/Passes.h"
#include "llvm/ADT/DenseMap.h"

namespace mlir::fsdp {

/// What `emitPlan` builds: the tables from the declarations of the module
/// (EmitPlan.cpp), and an instruction from an op (EmitInstructions.cpp).
class PlanEmitter {
public:
  explicit PlanEmitter(ModuleOp module) : module(module) {}

  FailureOr<::fsdp::plan::Plan> run(PlanOrigins *to);

private:
  //===--------------------------------------------------------------------===//
  // Tables
  //===--------------------------------------------------------------------===//

  LogicalResult emitDeclarations();
  void emitSource();
  LogicalResult emitMesh();
  LogicalResult emitParam(ParamOp param);
  LogicalResult emitBuffer(BufferOp buffer);
  LogicalResult emitKernel(KernelOp kernel);
  LogicalResult emitCode(KernelOp kernel, NamedAttribute target,
                         ::fsdp::plan::Kernel &entry);
  std::optional<::fsdp::plan::Arena> getArena(StringRef name);
  LogicalResult emitInputs();
  LogicalResult emitPrograms();

  //===--------------------------------------------------------------------===//
  // Values
  //===--------------------------------------------------------------------===//

  static FailureOr<::fsdp::plan::TensorSpec> getSpec(Operation *op,
                                                     RankedTensorType type);
  /// Gives `value` an id. A shard is recorded as rank 0's part, the largest.
  LogicalResult define(Value value, ::fsdp::plan::ValueId &id);
  LogicalResult define(ValueRange values,
                       std::vector<::fsdp::plan::ValueId> &ids);
  ::fsdp::plan::ValueId use(Value value) { return find(valueIds, value); }
  std::vector<::fsdp::plan::ValueId> use(ValueRange values);
  /// Makes `out` share the storage of `in`, which its instruction consumes.
  void share(::fsdp::plan::ValueId in, ::fsdp::plan::ValueId out);

  /// The index of what was defined before; an error of the operation that is
  /// being emitted otherwise, and 0.
  template <typename KeyT>
  int32_t find(const llvm::DenseMap<KeyT, int32_t> &table, KeyT key) {
    auto found = table.find(key);
    if (found != table.end())
      return found->second;
    if (!std::exchange(isIncomplete, true)) {
      auto diagnostic =
          current->emitOpError("names something that the plan does not have");
      if constexpr (std::is_same_v<KeyT, Value>)
        diagnostic << ", a value of type " << key.getType();
      else
        diagnostic << ": " << key;
    }
    return 0;
  }
  int32_t getUnit(FlatSymbolRefAttr name) {
    return find(unitIndex, name.getAttr());
  }
  int32_t getParam(FlatSymbolRefAttr name) {
    return find(paramIndex, name.getAttr());
  }
  std::vector<int32_t> getParams(ArrayAttr names);
  /// Null: row-major.
  static ::fsdp::plan::Strides getStrides(DenseI64ArrayAttr strides) {
    return strides ? ::fsdp::plan::Strides(strides.asArrayRef())
                   : ::fsdp::plan::Strides();
  }

  //===--------------------------------------------------------------------===//
  // Instructions
  //===--------------------------------------------------------------------===//

  LogicalResult emitBody(ProgramOp of,
                         std::vector<::fsdp::plan::Instruction> &to,
                         SmallVector<Operation *> *from);
  LogicalResult emitBlock(Block &block);
  LogicalResult emit(Operation *op);
  /// Adds an instruction of `kind` with what its op says for every kind:
  /// phase, microbatches, stream, events, buffer, source.
  template <typename KindT> LogicalResult append(Operation *op, KindT kind) {
    ::fsdp::plan::Instruction instruction = getCommon(op);
    instruction.kind = std::move(kind);
    instructions->push_back(std::move(instruction));
    if (ops)
      ops->push_back(op);
    return success();
  }
  ::fsdp::plan::Instruction getCommon(Operation *op);
  ::fsdp::plan::Stream getStream(StringAttr name);
  /// Memory that the op takes beside its results; -1 where it takes none.
  ::fsdp::plan::ValueId getBuffer(Operation *op);
  ::fsdp::plan::When getWhen(Operation *op);
  int64_t getPostForwardSize(ReshardOp reshard);
  /// Frees what `op`, an fsdp.free or fsdp.reshard, ends, with the instruction
  /// before it or with its own.
  LogicalResult emitFrees(Operation *op, ValueRange values);

  /// Specialised for each op that a plan has (EmitInstructions.cpp).
  template <typename OpT> LogicalResult emitOp(OpT op);
  LogicalResult emitArg(aten::CallOp call, Attribute attr, unsigned &next,
                        ::fsdp::plan::Arg &arg);
  /// An instruction from gradients to gradients of the same parameters.
  template <typename OpT, typename KindT>
  LogicalResult emitGradients(OpT op, ValueRange results, KindT kind);
  /// Whether the only rank of a replica has nothing to do for a gradient; what
  /// is all-reduced goes where the other replicas read it.
  bool keepsGradient(ReduceScatterOp reduce,
                     const ::fsdp::plan::ReduceScatter &kind,
                     size_t index) const;

  ModuleOp module;
  ProgramOp program;
  ::fsdp::plan::Plan result;
  PlanOrigins origins;
  /// Where the ops of the program being emitted go, if anywhere.
  SmallVector<Operation *> *ops = nullptr;
  /// Where the instructions and the loss of the program being emitted go.
  std::vector<::fsdp::plan::Instruction> *instructions = nullptr;
  ::fsdp::plan::ValueId *loss = &result.loss;
  ::fsdp::plan::Phase phase = ::fsdp::plan::Phase::Forward;
  Operation *current = nullptr;
  bool isIncomplete = false;
  llvm::DenseMap<Value, ::fsdp::plan::ValueId> valueIds;
  llvm::DenseMap<StringAttr, int32_t> unitIndex, paramIndex, bufferIndex,
      kernelIndex;
  /// The loop of the program being emitted, and its gathers of the first
  /// microbatch, by unit.
  MicrobatchesOp loop;
  llvm::DenseMap<int32_t, AllGatherOp> firstGathers;
  SourceTables sources{result};
};

} // namespace mlir::fsdp

#endif // FSDP_LIB_TRANSFORMS_LOWER_PLANEMITTER_H
