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

#include "fsdp/Plan/Instructions.h"
#include "fsdp/Plan/Limits.h"
#include "fsdp/Plan/Numerics.h"
#include "fsdp/Plan/Tensors.h"

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::plan {

/// Version of the JSON form. A reader accepts exactly this version.
inline constexpr int64_t kPlanVersion = 3;

/// A value of the program.
struct Value : TensorSpec {
  Value() = default;
  Value(TensorSpec spec) : TensorSpec(std::move(spec)) {}
  Value(std::vector<int64_t> shape, DType dtype)
      : TensorSpec{std::move(shape), dtype} {}

  /// The value whose storage this is a view of; -1: it has one of its own.
  ValueId storage = -1;
  /// Of a storage: the byte in the rank's arena where it begins, or, for an
  /// OffloadActivation's result, in the host's arena; -1: it is elsewhere
  /// (parameters, buffers, what peers read).
  int64_t offset = -1;
  /// Of a call's result: the strides that its operator is expected to return.
  Strides strides = {};
  bool operator==(const Value &) const = default;

  static constexpr auto fields() {
    return std::tuple(field("", asBase<TensorSpec>),
                      optionalField("storage", &Value::storage),
                      optionalField("offset", &Value::offset).atLeast(0),
                      optionalField("strides", &Value::strides).atLeast(0));
  }
};

/// The machine code of a kernel for one kind of processor, of a GPU PTX.
struct KernelCode {
  /// "x86-64-v3", "x86-64-v4" or "sm_90": what the processor must have.
  std::string target;
  /// Position-independent code and constants, which refer to nothing outside;
  /// for a GPU PTX.
  std::string image;
  /// The byte of the image where the function begins (KernelAbi.h).
  int64_t entry = 0;
  /// Of the kernel with this code (hashOf, Digest.h).
  std::string hash;
  /// Functions of LibTorch that it calls: "Sleef_expf16_u10" and the like.
  std::vector<std::string> imports = {};
  bool operator==(const KernelCode &) const = default;

  static constexpr auto fields() {
    return std::tuple(field("target", &KernelCode::target),
                      field("image", &KernelCode::image, Role::Hex),
                      field("entry", &KernelCode::entry).atLeast(0),
                      field("hash", &KernelCode::hash),
                      optionalField("imports", &KernelCode::imports));
  }
};

/// Calls that run as one. The calls say what is computed; the code, where the
/// processor has what it needs, gives the same bits in one pass over memory.
struct Kernel {
  std::string name;
  /// The values of the calls, the operands first. The strides of an operand are
  /// those for which the code was made.
  std::vector<Value> values;
  int64_t operands = 0;
  std::vector<Call> calls;
  std::vector<ValueId> results;
  /// How often the function's loop runs: its range is [0, trips).
  int64_t trips = 0;
  /// The code has the calls' bits only in one thread: ATen computes what is
  /// left of a thread's part in another way.
  bool whole = false;
  /// Empty: the calls run one by one.
  std::vector<KernelCode> code = {};
  bool operator==(const Kernel &) const = default;

  static constexpr auto fields() {
    return std::tuple(
        field("name", &Kernel::name), field("values", &Kernel::values),
        field("operands", &Kernel::operands).atLeast(0),
        field("calls", &Kernel::calls), field("results", &Kernel::results),
        field("trips", &Kernel::trips).atLeast(0),
        optionalField("whole", &Kernel::whole),
        optionalField("code", &Kernel::code));
  }
};

/// One rank's rows of a tensor that is sharded as `torch.chunk` does (its part
/// of another dimension is called rows too): ceil(rows / parts) rows per rank,
/// trailing ranks short or empty (FSDP2's placement).
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
  /// The dtype of its gradient as computed; nullopt for the compute dtype.
  std::optional<DType> gradDtype = std::nullopt;
  /// The dimension it is sharded on; one other than 0 divides evenly.
  int32_t shardDim = 0;
  /// It requires a gradient, but the loss does not depend on it, so it has none
  /// and is not updated (PyTorch's `grad` is None).
  bool unused = false;
  /// The unit with whose gradients FSDP2 reduces its own, if that is another
  /// one than `unit`; empty if not. See messagePlaces.
  std::string reducedWith = {};

  /// The gathered parameter.
  TensorSpec computeSpec() const {
    return {spec.shape, computeDtype.value_or(spec.dtype)};
  }
  /// The gradient before the reduction.
  TensorSpec gradSpec() const {
    return {spec.shape, gradDtype.value_or(computeSpec().dtype)};
  }

  static constexpr auto fields() {
    return std::tuple(field("name", &Param::name),
                      field("aliases", &Param::aliases),
                      field("", &Param::spec), field("unit", &Param::unit),
                      field("requires_grad", &Param::requiresGrad),
                      optionalField("compute_dtype", &Param::computeDtype),
                      optionalField("grad_dtype", &Param::gradDtype),
                      optionalField("shard_dim", &Param::shardDim),
                      optionalField("unused", &Param::unused),
                      optionalField("reduced_with", &Param::reducedWith));
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

  static constexpr auto fields() {
    return std::tuple(field("name", &Buffer::name), field("", &Buffer::spec),
                      field("persistent", &Buffer::persistent),
                      optionalField("strides", &Buffer::strides).atLeast(0));
  }
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
  /// Dense, none of them 0: how a rank lays out its batch.
  Strides strides = {};

  static constexpr auto fields() {
    return std::tuple(field("name", &Input::name), field("", &Input::spec),
                      field("value", &Input::value), field("low", &Input::low),
                      field("high", &Input::high),
                      optionalField("strides", &Input::strides).atLeast(0));
  }
};

/// One FSDP unit: the parameters gathered and reduced together, in FSDP2's
/// buffer order (children before own parameters, post-order).
struct Unit {
  std::string name;
  std::vector<int32_t> params;
  bool reshardAfterForward = true;
  /// Shards, their gradients and the optimizer state are on the host.
  bool cpuOffload = false;

  static constexpr auto fields() {
    return std::tuple(
        field("name", &Unit::name), field("params", &Unit::params),
        field("reshard_after_forward", &Unit::reshardAfterForward),
        field("cpu_offload", &Unit::cpuOffload));
  }
};

/// torch.optim's names and defaults; `fused` selects the fused ATen kernel,
/// `foreach` the update of all parameters at once; otherwise torch.optim's
/// default, which on a CPU is tensor by tensor.
struct Optimizer {
  /// "adam", "adamw", "sgd", "plugin"; "external": the program that hosts the
  /// runtime takes the gradients and updates the parameters after the step.
  std::string name;
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
  bool foreach = false;
  /// A plug-in's shared library, relative to the plan file, and its further
  /// hyperparameters.
  std::string library;
  std::map<std::string, double> options;

  bool operator==(const Optimizer &) const = default;

  bool isPlugin() const { return name == "plugin"; }
  bool isExternal() const { return name == "external"; }

  static constexpr auto fields() {
    return std::tuple(
        field("name", &Optimizer::name), field("lr", &Optimizer::lr),
        field("beta1", &Optimizer::beta1), field("beta2", &Optimizer::beta2),
        field("eps", &Optimizer::eps),
        field("weight_decay", &Optimizer::weightDecay),
        field("momentum", &Optimizer::momentum),
        field("dampening", &Optimizer::dampening),
        field("nesterov", &Optimizer::nesterov),
        field("amsgrad", &Optimizer::amsgrad),
        field("maximize", &Optimizer::maximize),
        field("fused", &Optimizer::fused),
        optionalField("foreach", &Optimizer::foreach),
        field("library", &Optimizer::library),
        field("options", &Optimizer::options));
  }
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

  static constexpr auto fields() {
    return std::tuple(
        field("warmup_steps", &LRSchedule::warmupSteps).atLeast(0),
        field("decay", &LRSchedule::decay),
        field("total_steps", &LRSchedule::totalSteps).atLeast(1),
        field("min_lr_ratio", &LRSchedule::minLRRatio));
  }
};

/// torch.amp.GradScaler's settings.
struct GradScaler {
  double initScale = 65536;
  double growthFactor = 2;
  double backoffFactor = 0.5;
  int64_t growthInterval = 2000;

  static constexpr auto fields() {
    return std::tuple(
        field("init_scale", &GradScaler::initScale),
        field("growth_factor", &GradScaler::growthFactor),
        field("backoff_factor", &GradScaler::backoffFactor),
        field("growth_interval", &GradScaler::growthInterval).atLeast(1));
  }
};

/// Where initial weights come from, relative to the plan file; path is empty
/// for a model captured on `meta`.
struct Weights {
  std::string path;
  /// "xxh3:" and 32 hex digits of XXH3-128 (canonical big-endian form) over
  /// the file, or empty.
  std::string hash;

  static constexpr auto fields() {
    return std::tuple(field("path", &Weights::path),
                      field("hash", &Weights::hash));
  }
};

/// What the step was captured for: operators and bits are those of this device
/// and this PyTorch.
struct CapturedFor {
  std::string device; ///< "cpu" or "cuda"
  std::string arch;   ///< of a GPU: "sm_90"; else empty
  std::string torch;  ///< "2.15.0"
  Numerics numerics;
  bool operator==(const CapturedFor &) const = default;

  static constexpr auto fields() {
    return std::tuple(field("device", &CapturedFor::device),
                      optionalField("arch", &CapturedFor::arch),
                      field("torch", &CapturedFor::torch),
                      optionalField("numerics", &CapturedFor::numerics));
  }
};

/// Ranks of one axis of a mesh, over which the model itself communicates: they
/// are `ranks`, their numbers `stride` apart.
struct ModelAxis {
  std::string name;
  int64_t ranks = 1;
  int64_t stride = 1;
  bool operator==(const ModelAxis &) const = default;

  static constexpr auto fields() {
    return std::tuple(
        field("name", &ModelAxis::name),
        field("ranks", &ModelAxis::ranks).within(1, kMaxWorldSize),
        field("stride", &ModelAxis::stride).within(1, kMaxWorldSize));
  }
};

/// How a model was parallelised before FSDP: each of the plan's ranks stands
/// for `ranks` that share one copy of the model between them, by tensor
/// parallelism for example. The plan is that of one of them; those of the
/// others have the same collectives.
struct ModelParallel {
  int64_t ranks = 1;
  /// The difference between the numbers of neighbours among the plan's ranks.
  int64_t dataStride = 1;
  std::vector<ModelAxis> axes;
  bool operator==(const ModelParallel &) const = default;

  static constexpr auto fields() {
    return std::tuple(
        field("ranks", &ModelParallel::ranks).within(1, kMaxWorldSize),
        field("data_stride", &ModelParallel::dataStride)
            .within(1, kMaxWorldSize),
        field("axes", &ModelParallel::axes));
  }
};

/// The memory that the plan lays out: every Value::offset is in [0, bytes).
struct Arena {
  int64_t bytes = 0;
  /// The most bytes of it that are alive at once: no layout takes less.
  int64_t lowerBound = 0;
  bool operator==(const Arena &) const = default;

  static constexpr auto fields() {
    return std::tuple(field("bytes", &Arena::bytes).atLeast(0),
                      field("lower_bound", &Arena::lowerBound).atLeast(0));
  }
};

struct Plan {
  int64_t version = kPlanVersion;
  std::string producer; ///< "fsdp-opt <version>"
  std::string model;    ///< the model's class name
  /// nullopt for a program that was not captured.
  std::optional<CapturedFor> capturedFor;
  int64_t worldSize = 1;
  /// Groups of ranks that each hold all parameters (HSDP); 1 otherwise. Rank r
  /// is rank r % shards() of replica r / shards().
  int64_t replicas = 1;
  /// nullopt if each rank has a copy of the model to itself.
  std::optional<ModelParallel> modelParallel;
  Weights weights;
  Optimizer optimizer;
  std::vector<Optimizer> paramGroups;
  std::optional<LRSchedule> lrSchedule;
  std::optional<GradScaler> gradScaler;
  /// Microbatches per step: forward and backward run this many times.
  int64_t accumulationSteps = 1;
  std::vector<std::string> modules;
  /// Lines of the model's source, "folder/model.py:12".
  std::vector<std::string> lines;
  std::vector<Value> values;
  std::optional<Arena> arena;
  /// The most bytes that a rank may take.
  std::optional<int64_t> memoryBudget;
  /// Of the host: where offloaded activations lie; nullopt where there are
  /// none.
  std::optional<Arena> hostArena;
  std::vector<Param> params;
  std::vector<Buffer> buffers;
  std::vector<Input> inputs;
  std::vector<Unit> units;
  /// What `fused` instructions run.
  std::vector<Kernel> kernels;
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
  /// Ranks of the job: those that the model shares with this plan's included.
  int64_t jobRanks() const {
    return worldSize * (modelParallel ? modelParallel->ranks : 1);
  }
  /// Ranks that a parameter is sharded over.
  int64_t shards() const { return worldSize / replicas; }
  /// A rank's place on the mesh of replicas and shards, which is row-major.
  int64_t replicaIndex(int64_t rank) const { return rank / shards(); }
  int64_t shardIndex(int64_t rank) const { return rank % shards(); }
  /// The ranks of one replica; those of all replicas that own one shard.
  /// Rising.
  std::vector<int64_t> shardGroup(int64_t rank) const;
  std::vector<int64_t> replicateGroup(int64_t rank) const;

  /// All but the version, which comes first, and the digest, which comes last.
  static constexpr auto fields() {
    return std::tuple(
        field("producer", &Plan::producer), field("model", &Plan::model),
        optionalField("captured_for", &Plan::capturedFor),
        field("world_size", &Plan::worldSize).within(1, kMaxWorldSize),
        field("replicas", &Plan::replicas).within(1, kMaxWorldSize),
        optionalField("model_parallel", &Plan::modelParallel),
        field("weights", &Plan::weights), field("optimizer", &Plan::optimizer),
        field("param_groups", &Plan::paramGroups),
        field("lr_schedule", &Plan::lrSchedule),
        field("grad_scaler", &Plan::gradScaler),
        field("accumulation_steps", &Plan::accumulationSteps)
            .within(1, kMaxAccumulationSteps),
        field("modules", &Plan::modules), optionalField("lines", &Plan::lines),
        field("values", &Plan::values), field("arena", &Plan::arena),
        optionalField("host_arena", &Plan::hostArena),
        optionalField("memory_budget", &Plan::memoryBudget).atLeast(1),
        field("params", &Plan::params), field("buffers", &Plan::buffers),
        field("inputs", &Plan::inputs), field("units", &Plan::units),
        optionalField("kernels", &Plan::kernels), field("init", &Plan::init),
        field("evaluation", &Plan::evaluation),
        field("evaluation_loss", &Plan::evaluationLoss),
        field("instructions", &Plan::instructions, Role::Steps),
        field("loss", &Plan::loss));
  }
};

/// The part of a parameter, and of its gradient, that the `index`-th rank of a
/// replica owns; the whole of an ignored parameter.
TensorSpec shardSpec(const Plan &plan, int32_t param, int64_t index);
/// Bytes of the shards of all ranks of a replica, each as large as the first
/// one, in `dtype`: what a collective moves, FSDP2's padding included.
int64_t paddedBytes(const Plan &plan, int32_t param, DType dtype);

/// Where that part is in the whole tensor, row-major: `count` runs of `size`
/// elements, the first at `begin`, with their beginnings `stride` apart. One
/// after the other, they are the part, row-major.
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
/// The unit that a collective gathers or reduces, otherwise the unit of the
/// module that the instruction came from; -1 if it came from none.
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
