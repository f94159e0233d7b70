//===- Plan.h - the executable plan, the only bridge to the runtime -------===//
//
// A plan is what `fsdp-opt --emit plan` writes and `fsdp-run` executes: one
// SPMD instruction list for all ranks, with every shape, placement and
// collective explicit. These types use the C++ standard library only: neither
// MLIR nor Torch may appear here, so that compiler and runtime can each be
// built without the other.
//
// The JSON form and its rules are specified in docs/plan-format.md. Reading
// validates everything the executor relies on (indices in range, operands
// defined before use, one program per plan), so that the executor does not
// have to check again.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_PLAN_H
#define FSDP_PLAN_PLAN_H

#include <complex>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp::plan {

/// Version of the JSON form. A reader accepts exactly this version.
inline constexpr int64_t kPlanVersion = 2;

/// Element types, spelled as PyTorch spells them ("float32", "bfloat16", ...).
enum class DType : uint8_t {
  Float32,
  Float64,
  Float16,
  BFloat16,
  Int64,
  Int32,
  Int16,
  Int8,
  UInt8,
  Bool,
  UInt16,
  UInt32,
  UInt64,
  Float8E4M3FN,
  Float8E5M2,
  Complex32,
  Complex64,
  Complex128,
};

/// Bytes of one element.
int64_t byteWidth(DType dtype);
/// "float32" and so on.
std::string_view dtypeName(DType dtype);
/// float32, float64, float16 or bfloat16.
bool isFloatingPoint(DType dtype);
/// An integer or bool.
bool isInteger(DType dtype);
/// The inverse of dtypeName; nullopt for an unknown name.
std::optional<DType> parseDType(std::string_view name);

/// Shape and element type of a dense tensor.
struct TensorSpec {
  std::vector<int64_t> shape;
  DType dtype = DType::Float32;

  int64_t numElements() const;
  int64_t numBytes() const { return numElements() * byteWidth(dtype); }
  bool operator==(const TensorSpec &) const = default;
};

/// How many elements lie between neighbours along each dimension; empty where
/// the tensor is row-major without gaps.
using Strides = std::vector<int64_t>;
/// `strides`, or those of a row-major tensor where it is empty.
Strides fullStrides(const std::vector<int64_t> &shape, const Strides &strides);
/// Whether each element of one storage is an element of the tensor, once, but
/// for dimensions of stride 0, which are as if of one element.
bool areDense(const std::vector<int64_t> &shape, const Strides &strides);

/// Index into Plan::values. Every SSA value of the program has one.
using ValueId = int32_t;

/// A value of the program.
struct Value : TensorSpec {
  Value() = default;
  Value(TensorSpec spec) : TensorSpec(std::move(spec)) {}
  Value(std::vector<int64_t> shape, DType dtype)
      : TensorSpec{std::move(shape), dtype} {}

  /// The value whose storage this is a view of; -1: it has one of its own.
  ValueId storage = -1;
  /// Of a storage: the byte in the rank's arena where it begins, of an
  /// OffloadActivation's result in the host's; -1: it lies elsewhere
  /// (parameters, buffers, what peers read).
  int64_t offset = -1;
  /// Of a call's result: those that its operator is expected to give.
  Strides strides = {};
};

/// A constant or tensor argument of a call, in schema order. `None` stands for
/// an absent optional. A Tensor inside a List is an element of a Tensor[]
/// argument; None inside a List an absent element of a Tensor?[].
struct Arg;
using ArgList = std::vector<Arg>;
struct NoneArg {
  bool operator==(const NoneArg &) const = default;
};
struct TensorArg {
  ValueId value = -1;
  bool operator==(const TensorArg &) const = default;
};
/// Any c10::Device argument: the device the rank runs on.
struct DeviceArg {
  bool operator==(const DeviceArg &) const = default;
};
struct Arg {
  std::variant<NoneArg, TensorArg, DeviceArg, bool, int64_t, double,
               std::complex<double>, std::string, ArgList>
      value;
  bool operator==(const Arg &) const = default;
};

/// One rank's rows of a tensor that is sharded as `torch.chunk` does (its part
/// of another dimension is called rows too):
/// ceil(rows / parts) rows a rank, trailing ranks short or empty (FSDP2's
/// placement).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};
RowRange shardRows(int64_t rows, int64_t parts, int64_t index);

/// A parameter. `name` is the first of its qualified names in the model,
/// `aliases` the further names of a tied parameter.
struct Param {
  std::string name;
  std::vector<std::string> aliases;
  TensorSpec spec;
  /// Index into Plan::units; -1 for an ignored parameter, which is whole on
  /// every rank, each with a value of its own.
  int32_t unit = -1;
  bool requiresGrad = true;
  /// The dtype in which it is gathered; nullopt for its own.
  std::optional<DType> computeDtype = std::nullopt;
  /// The dtype in which its gradient comes; nullopt for that of computing.
  std::optional<DType> gradDtype = std::nullopt;
  /// The dimension it is sharded on; other than 0 it divides evenly.
  int32_t shardDim = 0;
  /// Of one that requires a gradient: the loss does not depend on it, so it has
  /// none and is not updated (PyTorch's `grad` is None).
  bool unused = false;

  /// The gathered parameter.
  TensorSpec computeSpec() const {
    return {spec.shape, computeDtype.value_or(spec.dtype)};
  }
  /// The gradient before the reduction.
  TensorSpec gradSpec() const {
    return {spec.shape, gradDtype.value_or(computeSpec().dtype)};
  }
};

/// A buffer (replicated on every rank; may be mutated by the program).
struct Buffer {
  std::string name;
  TensorSpec spec;
  /// False for a buffer registered with persistent=False: it is in the weights
  /// file all the same, but not in what --save-weights writes.
  bool persistent = true;
  /// Dense; a dimension of stride 0 has the same elements at every index.
  Strides strides = {};
};

/// A tensor that each step takes from the data set, dim 0 being the samples.
struct Input {
  /// Keyword name, or "arg0", "arg1", ... by position.
  std::string name;
  TensorSpec spec;
  ValueId value = -1;
  /// For integer inputs: synthetic data is uniform in [low, high).
  int64_t low = 0;
  int64_t high = 2;
  /// Dense, none of them 0: how a rank lays its batch out.
  Strides strides = {};
};

/// One FSDP unit: the parameters gathered and reduced together, in FSDP2's
/// buffer order (children before own parameters, post-order).
struct Unit {
  std::string name;
  std::vector<int32_t> params;
  bool reshardAfterForward = true;
  /// Shards, their gradients and the optimizer's state lie on the host.
  bool cpuOffload = false;
};

enum class Phase : uint8_t { Forward, Backward, Optimizer };
/// "forward" and so on.
std::string_view phaseName(Phase phase);

/// Where an instruction runs. Those of one stream run one after the other, in
/// the order of the list; those of different streams at the same time, unless
/// events order them. A collective or a copy on the compute stream is awaited
/// where it stands.
enum class Stream : uint8_t {
  Compute,
  AllGather,
  ReduceScatter,
  AllReduce,
  CopyToDevice,
  CopyToHost,
};
inline constexpr size_t kNumStreams = 6;
/// "compute", "all_gather" and so on.
std::string_view streamName(Stream stream);

/// Number of an event, which one instruction records at its end and others, of
/// other streams, wait for before they begin.
using EventId = int32_t;

/// Calls one ATen operator.
struct Call {
  std::string op;            ///< "aten::add"
  std::string overload;      ///< "Tensor", or empty
  ArgList args;              ///< one per schema argument
  std::vector<ValueId> outs; ///< -1: result not used
  /// >= 0: the storage that result 0 allocates is the reduce-scatter input of
  /// this parameter (Plan::params); the runtime lets the operator write there,
  /// so that no copy-in is needed.
  int32_t reduceInputOf = -1;
  /// Operands that it writes in place.
  std::vector<ValueId> mutates = {};
  /// Made again in backward, as forward's results were not kept; for messages.
  bool recompute = false;
};

/// Binds a buffer to a value.
struct ReadBuffer {
  int32_t buffer = -1;
  ValueId out = -1;
};

/// Binds an ignored parameter to a value.
struct ReadParam {
  int32_t param = -1;
  ValueId out = -1;
};

/// A dense literal; `data` holds numElements values, little-endian bytes.
struct Constant {
  std::string data;
  ValueId out = -1;
};

/// Gathers every parameter of a unit; outs[i] is the full tensor of
/// units[unit].params[i], valid until the matching Reshard.
struct AllGather {
  int32_t unit = -1;
  std::vector<ValueId> outs;
  /// > 0: from what a group of this many neighbours kept at the last Reshard.
  int64_t group = 0;
  /// Gathers in the first microbatch of a step only; in later ones `outs` are
  /// what the unit's last AllGather gathered.
  bool firstMicrobatch = false;
  /// The buffer of the CopyToDevice or Reshard that it gathers from; -1 where
  /// it gathers from the shards, or there is no such buffer.
  ValueId source = -1;
};

/// Ends the life of a unit's gathered parameters.
struct Reshard {
  int32_t unit = -1;
  /// > 0: the ranks of each group of this many neighbours in a replica keep the
  /// parameters between them; the i-th keeps what the i-th equal share of the
  /// replica's ranks own.
  int64_t keep = 0;
  /// In the last microbatch of a step only.
  bool lastMicrobatch = false;
};

/// Reduces gradients over the ranks of a replica and keeps this rank's rows.
/// ins[i] is the full gradient of params[i] in its gradDtype, or the sum of an
/// Accumulate; outs[i] is the shard in the parameter's own dtype, or where it
/// goes to an AllReduce, in reduceDtype. Each gradient
/// is cast to reduceDtype, divided by predivide, and multiplied by premultiply,
/// which is rounded to it too (NCCL's PREMUL_SUM); then a sum in ascending
/// rank order and a division by postdivide, every result rounded to
/// reduceDtype. An average (FSDP2 over Gloo) is a sum without predivide,
/// divided by Plan::shards().
struct ReduceScatter {
  int32_t unit = -1;
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  /// Runs in the last microbatch of a step only.
  bool lastMicrobatch = false;
  /// nullopt: that of the gradients.
  std::optional<DType> reduceDtype = std::nullopt;
  /// nullopt: an average.
  struct Divisors {
    double predivide = 1;
    double postdivide = 1;
    double premultiply = 1;
    bool operator==(const Divisors &) const = default;
  };
  std::optional<Divisors> divisors = std::nullopt;
};

/// Adds ins[i], the whole gradient of params[i] or its shard, to the sum over
/// the step's microbatches; outs[i] is that sum up to this microbatch, and its
/// dtype the one in which it is added.
struct Accumulate {
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
};

/// Reduces gradient shards over the replicas: ins[i] and outs[i] are shards of
/// the gradient of params[i], ins[i] as ReduceScatter leaves it. Sum in
/// ascending order of replicas in the dtype of ins[i], then a division by their
/// number, or by postdivide, and a cast to the parameter's own dtype.
struct AllReduce {
  int32_t unit = -1;
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  /// nullopt: an average.
  std::optional<double> postdivide = std::nullopt;
  /// Runs in the last microbatch of a step only.
  bool lastMicrobatch = false;
};

/// Copies this rank's shards of an offloaded unit to the device, for the
/// all-gather that follows; they end with its Reshard.
struct CopyToDevice {
  int32_t unit = -1;
};

/// Copies gradient shards of an offloaded unit to the host: ins[i] and outs[i]
/// are shards of the gradient of params[i].
struct CopyToHost {
  int32_t unit = -1;
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  /// Runs in the last microbatch of a step only.
  bool lastMicrobatch = false;
};

/// Copies a storage to the host: ins[0] owns it, the others are views of it.
/// The device's copy is not used any more. `out` is the host's, of ins[0]'s
/// shape and dtype.
struct OffloadActivation {
  std::vector<ValueId> ins;
  ValueId out = -1;
};

/// Copies a storage back to the device: outs[i] is as ins[i] was of the
/// OffloadActivation that made `host`; outs[0] owns the storage, the others are
/// views of it.
struct ReloadActivation {
  ValueId host = -1;
  std::vector<ValueId> outs;
};

/// Binds the step's loss scale, a float32 scalar, to a value.
struct LossScale {
  ValueId out = -1;
};

/// torch.amp.GradScaler.unscale_ of the gradient shards ins[i] of params[i]:
/// outs[i] is ins[i] divided by the loss scale. An element that is not finite,
/// on any rank, makes the step's OptimizerStep change nothing. Consumes ins.
struct Unscale {
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  /// outs are as ins; the optimizer's fused kernels divide.
  bool deferred = false;
};

/// torch.nn.utils.clip_grad_norm_ over the gradient shards ins[i] of params[i],
/// which are in the order of model.parameters(). Consumes ins.
struct ClipGradNorm {
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  double maxNorm = 1.0;
  double normType = 2.0; ///< 1, 2 or infinity
};

/// Updates the shards of params[i] with grads[i]. groups[i] is 0 for
/// Plan::optimizer, n for Plan::paramGroups[n - 1]; empty: all are 0. An
/// ignored parameter is updated whole, with this rank's own gradient.
struct OptimizerStep {
  std::vector<int32_t> params;
  std::vector<ValueId> grads;
  std::vector<int32_t> groups;
};

/// Initialises a parameter with a whole value, of which each rank keeps its
/// rows.
struct WriteParam {
  int32_t param = -1;
  ValueId value = -1;
};

/// Initialises a buffer.
struct WriteBuffer {
  int32_t buffer = -1;
  ValueId value = -1;
};

/// Of the compute stream: lets no later instruction of it begin before its
/// Instruction::waits are complete.
struct Wait {};

struct Instruction {
  std::variant<Call, ReadBuffer, Constant, AllGather, Reshard, ReduceScatter,
               Accumulate, ClipGradNorm, OptimizerStep, WriteParam, WriteBuffer,
               ReadParam, AllReduce, CopyToDevice, CopyToHost, LossScale,
               Unscale, Wait, OffloadActivation, ReloadActivation>
      kind;
  /// Of the step; without meaning in Plan::init and evaluation.
  Phase phase = Phase::Forward;
  /// Index into Plan::modules: the module this came from, for messages.
  int32_t module = -1;
  /// Values not used after this instruction.
  std::vector<ValueId> frees = {};
  Stream stream = Stream::Compute;
  /// Events that must be complete before it begins. In a microbatch in which
  /// the instruction that records one does not run, it is complete.
  std::vector<EventId> waits = {};
  /// The event that its end completes, or -1.
  EventId records = -1;
  /// Memory that it needs beside its results where ranks have memory of their
  /// own, a value of bufferSpec (DeviceBuffers.h); -1 where it needs none.
  ValueId buffer = -1;
  /// Why it stands where it does, for people; empty where nothing is said.
  std::string why = {};
  /// Index into Plan::lines: the line of the model that made the call, for
  /// messages.
  int32_t line = -1;
};

/// torch.optim's names and defaults; `fused` selects the fused ATen kernel,
/// otherwise the per-tensor formula torch.optim uses on CPU.
struct Optimizer {
  std::string name; ///< "adam", "adamw", "sgd", "plugin"
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weightDecay = 0.0;
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;
  bool amsgrad = false;
  bool maximize = false;
  bool fused = false;
  /// A plug-in's shared library, relative to the plan file, and its further
  /// hyperparameters.
  std::string library;
  std::map<std::string, double> options;

  bool operator==(const Optimizer &) const = default;
};

/// Factor on the learning rate at each step, as torchtitan's schedule under a
/// LambdaLR.
struct LRSchedule {
  int64_t warmupSteps = 0;
  std::string decay = "constant"; ///< "cosine", "linear", "constant"
  int64_t totalSteps = 1;
  double minLRRatio = 0.0;

  /// The factor of step `step`, counted from 0: (step + 1) / warmup up to the
  /// end of the warm-up; then, with p the fraction of the decay that is done,
  /// min + (1 - min) d(p) with d = 0.5 (1 + cos(pi p)), 1 - p or 1.
  double factor(int64_t step) const;
};

/// torch.amp.GradScaler's settings.
struct GradScaler {
  double initScale = 65536;
  double growthFactor = 2;
  double backoffFactor = 0.5;
  int64_t growthInterval = 2000;
};

/// Where initial weights come from, relative to the plan file; path is empty
/// for a model captured on `meta`.
struct Weights {
  std::string path;
  /// "xxh3:" and 32 hex digits of XXH3-128 (canonical big-endian form) over
  /// the file, or empty.
  std::string hash;
};

/// The memory that the plan lays out: every Value::offset is in [0, bytes).
struct Arena {
  int64_t bytes = 0;
  /// Most bytes of it alive at once: no layout takes less.
  int64_t lowerBound = 0;
};

struct Plan {
  int64_t version = kPlanVersion;
  std::string producer; ///< "fsdp-opt <version>"
  std::string model;    ///< the model's class name
  int64_t worldSize = 1;
  /// Groups of ranks that each hold all parameters (HSDP); 1 otherwise. Rank r
  /// is rank r % shards() of replica r / shards().
  int64_t replicas = 1;
  Weights weights;
  Optimizer optimizer;
  std::vector<Optimizer> paramGroups;
  std::optional<LRSchedule> lrSchedule;
  std::optional<GradScaler> gradScaler;
  /// Microbatches a step: forward and backward run as often.
  int64_t accumulationSteps = 1;
  std::vector<std::string> modules;
  /// Lines of the model's source, "folder/model.py:12".
  std::vector<std::string> lines;
  std::vector<Value> values;
  std::optional<Arena> arena;
  /// Bytes that a rank may take at most.
  std::optional<int64_t> memoryBudget;
  /// Of the host: where offloaded activations lie; nullopt where there are
  /// none.
  std::optional<Arena> hostArena;
  std::vector<Param> params;
  std::vector<Buffer> buffers;
  std::vector<Input> inputs;
  std::vector<Unit> units;
  /// How the model initialises itself where there are no weights: calls,
  /// constants, and a write of every parameter and buffer. Empty if the model
  /// was captured without. Its values end with it.
  std::vector<Instruction> init;
  /// The loss of a batch in eval mode, on the same inputs as the step: forward
  /// alone. Empty if the model was captured without. Its values end with it.
  std::vector<Instruction> evaluation;
  ValueId evaluationLoss = -1; ///< -1 without an evaluation
  /// The training step.
  std::vector<Instruction> instructions;
  ValueId loss = -1;

  /// The settings of each parameter group, as OptimizerStep::groups counts.
  std::vector<Optimizer> optimizerGroups() const {
    std::vector<Optimizer> groups = {optimizer};
    groups.insert(groups.end(), paramGroups.begin(), paramGroups.end());
    return groups;
  }
  /// Ranks that a parameter is sharded over.
  int64_t shards() const { return worldSize / replicas; }
};

/// The part of a parameter, and of its gradient, that the `index`-th rank of a
/// replica owns; the whole of an ignored parameter.
TensorSpec shardSpec(const Plan &plan, int32_t param, int64_t index);

/// Where that part lies in the whole, row-major: `count` runs of `size`
/// elements, the first at `begin`, their beginnings `stride` apart. One after
/// the other they are the part, row-major.
struct ShardRuns {
  int64_t count = 1;
  int64_t begin = 0;
  int64_t size = 0;
  int64_t stride = 0;
};
ShardRuns shardRuns(const Plan &plan, int32_t param, int64_t index);

/// The unit of the innermost module that contains `module`; -1 if none does.
/// A unit's name joins its modules with `+`; that of the root unit, which
/// contains all, is "(root)".
int32_t unitOfModule(const Plan &plan, std::string_view module);
/// That which a collective gathers or reduces, else that of the module that the
/// instruction came from; -1 if it came from none.
int32_t unitOfInstruction(const Plan &plan, const Instruction &instruction);

/// Any defect of a plan: the message names the file (or "plan"), the JSON path
/// and what was expected and found.
struct PlanError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Reads and validates JSON text; `origin` is the file's name for messages.
/// Throws PlanError. Bounded in depth and size; duplicate keys are errors.
Plan parsePlan(std::string_view json, const std::string &origin);
/// Reads and validates a file. Throws PlanError.
Plan readPlan(const std::string &path);
/// The JSON form: stable key order, one line per table row and instruction.
std::string printPlan(const Plan &plan);
/// Checks every invariant of docs/plan-format.md, P1 and so on; throws
/// PlanError.
void verifyPlan(const Plan &plan, const std::string &origin);

} // namespace fsdp::plan

#endif // FSDP_PLAN_PLAN_H
