//===- FSDP.h - the fsdp dialect ------------------------------------------===//
#ifndef FSDP_DIALECT_FSDP_H
#define FSDP_DIALECT_FSDP_H

#include "fsdp/Plan/Numerics.h"

#include "mlir/Bytecode/BytecodeOpInterface.h"
#include "mlir/IR/BuiltinAttributes.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/BuiltinTypes.h"
#include "mlir/IR/Dialect.h"
#include "mlir/IR/OpDefinition.h"
#include "mlir/IR/OpImplementation.h"
#include "mlir/IR/SymbolTable.h"
#include "mlir/Interfaces/FunctionInterfaces.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"

#include "fsdp/Dialect/FSDPDialect.h.inc"
#include "fsdp/Dialect/FSDPEnums.h.inc"

#define GET_ATTRDEF_CLASSES
#include "fsdp/Dialect/FSDPAttrs.h.inc"

#define GET_TYPEDEF_CLASSES
#include "fsdp/Dialect/FSDPTypes.h.inc"

namespace mlir::fsdp {

/// The order of collectives, as a memory resource.
struct CommResource : SideEffects::Resource::Base<CommResource> {
  StringRef getName() final { return "fsdp.comm"; }
};
/// Parameters, buffers and gradients, as a memory resource.
struct StateResource : SideEffects::Resource::Base<StateResource> {
  StringRef getName() final { return "fsdp.state"; }
};

/// Name of the unit that owns what no pattern claims; no module can have it.
inline constexpr llvm::StringLiteral rootUnitName = "(root)";
/// The word in an `fsdp.checkpoint_pattern`'s `save` for plan::isProduct.
inline constexpr llvm::StringLiteral productsName = "products";
/// The mesh axis that parameters are sharded over.
inline constexpr llvm::StringLiteral shardAxisName = "shard";
/// The mesh axis of HSDP's replicas.
inline constexpr llvm::StringLiteral replicateAxisName = "replicate";

/// Module attributes that capture and plan carry through the compiler.
inline constexpr llvm::StringLiteral modelAttrName = "fsdp.model";
inline constexpr llvm::StringLiteral weightsAttrName = "fsdp.weights";
inline constexpr llvm::StringLiteral weightsHashAttrName = "fsdp.weights_hash";
/// Dictionary: the `device`, its `arch` and the version of `torch` that the
/// program was captured for, and the `numerics`, PyTorch's settings.
inline constexpr llvm::StringLiteral capturedForAttrName = "fsdp.captured_for";
/// The settings of PyTorch that an `fsdp.captured_for` has.
::fsdp::plan::Numerics getNumerics(DictionaryAttr capturedFor);
/// Dictionary: how the model was parallelised before FSDP, `ranks`,
/// `data_stride` and the `axes` (plan::ModelParallel); absent if it was not.
inline constexpr llvm::StringLiteral modelParallelAttrName =
    "fsdp.model_parallel";
/// Dictionary: the class of each module, by the module's dotted name. For
/// fsdp-assign-units, which drops it.
inline constexpr llvm::StringLiteral moduleClassesAttrName =
    "fsdp.module_classes";
/// The mixed precision that the program's casts follow, by name of the unit;
/// absent if it has none.
inline constexpr llvm::StringLiteral capturedPrecisionAttrName =
    "fsdp.captured_precision";
/// Attributes of program arguments.
inline constexpr llvm::StringLiteral inputNameAttrName = "fsdp.name";
inline constexpr llvm::StringLiteral inputStridesAttrName = "fsdp.strides";
inline constexpr llvm::StringLiteral inputLowAttrName = "fsdp.low";
inline constexpr llvm::StringLiteral inputHighAttrName = "fsdp.high";
/// Attribute of the module: its level, an `#fsdp.level`.
inline constexpr llvm::StringLiteral levelAttrName = "fsdp.level";
/// Attribute of the module: the memory that its plan is laid out for, "shared"
/// or "device"; without it, that of the schedule's device.
inline constexpr llvm::StringLiteral memoryAttrName = "fsdp.memory";
/// Attributes of the module at the planned level, dictionaries of `bytes` and
/// `lower_bound`: the arena of a rank, and that of the host.
inline constexpr llvm::StringLiteral arenaAttrName = "fsdp.arena";
inline constexpr llvm::StringLiteral hostArenaAttrName = "fsdp.host_arena";
/// Attributes of ops that become instructions: the stream, where it is not the
/// compute stream; the events that must be complete before it begins; the event
/// that its end completes.
inline constexpr llvm::StringLiteral streamAttrName = "fsdp.stream";
inline constexpr llvm::StringLiteral waitsAttrName = "fsdp.waits";
inline constexpr llvm::StringLiteral recordsAttrName = "fsdp.records";
/// Attribute of ops at the planned level: for each result the byte of the arena
/// where its storage begins, or -1. Of an argument of a program: one such byte.
inline constexpr llvm::StringLiteral offsetsAttrName = "fsdp.offsets";
inline constexpr llvm::StringLiteral offsetAttrName = "fsdp.offset";

/// Attributes of any op in a program: the module that it comes from, the line
/// of the model's source, and why it stands where it does.
inline constexpr llvm::StringLiteral moduleAttrName = "fsdp.module";
inline constexpr llvm::StringLiteral lineAttrName = "fsdp.line";
inline constexpr llvm::StringLiteral whyAttrName = "fsdp.why";

} // namespace mlir::fsdp

#include "fsdp/Dialect/FSDPInterfaces.h.inc"

#define GET_OP_CLASSES
#include "fsdp/Dialect/FSDPOps.h.inc"

namespace mlir::fsdp {

/// The level that the module states; none if it states none.
std::optional<Level> getLevel(ModuleOp module);
void setLevel(ModuleOp module, Level level);
/// Fails, with an error on the module that names `user`, unless the module is
/// at `expected` or states no level.
LogicalResult verifyLevel(ModuleOp module, Level expected,
                          const llvm::Twine &user);

/// The training step: the one program of a module that has a result. Null with
/// an error on the module when there is none or more than one.
ProgramOp getProgram(ModuleOp module);
/// The initialisation: the program of a module that has no result, or null.
/// More than one is an error of getProgram.
ProgramOp getInitProgram(ModuleOp module);
/// The program marked `evaluation`, null if there is none; as above.
ProgramOp getEvaluationProgram(ModuleOp module);
/// Parameters of each unit in unit order (their order in the module).
llvm::MapVector<StringAttr, llvm::SmallVector<ParamOp>>
getUnitParams(ModuleOp module);

/// The mesh axis that an element of a ShardingAttr's dimension names: a string,
/// or a MeshAxisAttr for a sub-axis of that size.
llvm::StringRef getAxisName(Attribute axis);

/// Whether gradients of a unit without a `reduce_dtype` are reduced in the
/// dtype of their parameters, as FSDP2 does since PyTorch 2.15, and not in
/// their own, as before. This depends on the version in `fsdp.captured_for` of
/// the op's module; without one, true.
bool reducesInParamDType(Operation *op);

/// The type in which whole gradients of a parameter are added over
/// microbatches, FSDP2's `unsharded_grad_dtype`; `unit` is null for an ignored
/// parameter.
RankedTensorType getAccumulatedType(ParamOp param, UnitOp unit);

/// The op that computes or communicates a value: the collective if an fsdp.wait
/// returns it, the op in the loop if it is a result of the loop; null for an
/// argument.
Operation *getProducer(Value value);
/// The gather whose result `param` is, or null.
AllGatherOp getGather(Value param);

/// The loop over the microbatches of a step; null where it has but one
/// microbatch.
MicrobatchesOp getMicrobatches(ProgramOp program);
/// For a result of the loop, what the microbatches yield there; for any other
/// value, the value itself.
Value getYielded(Value value);
/// The condition under which an op runs in a microbatch; a wait has that of
/// what it waits for. Null if it runs in every one.
Value getCondition(Operation *op);

/// The op that returns the results of a collective: the wait for its future, or
/// else the collective itself.
Operation *getResultsOp(Operation *collective);

/// The qualified name of the module whose forward or backward made the op;
/// empty if that is the model itself, or none.
StringRef getModuleName(Operation *op);
/// The line of the model's source, `folder/file.py:12`; empty if it is not
/// known.
StringRef getSourceLine(Operation *op);
/// The byte of the arena where a value's storage begins, or -1.
int64_t getOffset(Value value);

/// Gives `op` the module of `origin`, and a call the line too, if `origin` has
/// them.
void copyOrigin(Operation *origin, Operation *op);

/// Says, for a human reader, why an op is where it is; the last pass that
/// places it decides.
void setReason(Operation *op, const llvm::Twine &why);
/// Empty if no reason is given.
StringRef getReason(Operation *op);

/// Whether strides fit a shape, and each element of one storage is an element
/// of the tensor exactly once, except for dimensions of stride 0.
bool areDense(ArrayRef<int64_t> shape, ArrayRef<int64_t> strides);

} // namespace mlir::fsdp

#endif // FSDP_DIALECT_FSDP_H
