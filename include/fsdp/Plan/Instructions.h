//===- Instructions.h - what the programs of a plan consist of ------------===//
//
// One struct for each kind of instruction, and what all kinds have in common.
// How to add one: docs/adding-an-instruction.md.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_INSTRUCTIONS_H
#define FSDP_PLAN_INSTRUCTIONS_H

#include "fsdp/Plan/Fields.h"
#include "fsdp/Plan/Tensors.h"

#include <complex>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace fsdp::plan {

/// Index into Plan::values. Every SSA value of the program has one.
using ValueId = int32_t;

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

enum class Phase : uint8_t { Forward, Backward, Optimizer };
inline constexpr size_t kNumPhases = 3;
/// "forward" and so on.
std::string_view phaseName(Phase phase);

/// Where an instruction runs. Instructions of one stream run one after the
/// other, in the order of the list; those of different streams run at the same
/// time, unless events order them. A collective or a copy on the compute stream
/// is awaited where it is.
enum class Stream : uint8_t {
  Compute,
  AllGather,
  ReduceScatter,
  AllReduce,
  CopyToDevice,
  CopyToHost,
  /// Collectives that the model itself makes. None runs beside computation
  /// yet: they are calls of the compute stream, but their time is told apart.
  ModelAxes,
};
inline constexpr size_t kNumStreams = 7;
/// "compute", "all_gather" and so on.
std::string_view streamName(Stream stream);

/// The microbatches of a step that an instruction of forward or backward runs
/// in. What it defines in one of them stays until it is freed or defined again.
enum class When : uint8_t { Every, First, Last };
inline constexpr size_t kNumWhens = 3;
/// "every", "first", "last".
std::string_view whenName(When when);

/// Number of an event, which one instruction records at its end and others, of
/// other streams, wait for before they begin.
using EventId = int32_t;

/// "aten::add" and "Tensor", or an empty overload.
struct OperatorName {
  std::string op;
  std::string overload;
  bool operator==(const OperatorName &) const = default;
};

// Each kind of instruction has a `verb`, its first key in the JSON form, its
// `fields()` (Fields.h), and a `meaning`, which is its row in
// docs/plan-format.md. `ownStream` is the stream that it runs on if it runs
// beside computation. Lists of values beside a list of `params` are parallel to
// it.

struct Call : OperatorName {
  ArgList args;              ///< one per schema argument
  std::vector<ValueId> outs; ///< -1: result not used
  /// >= 0: the storage that result 0 allocates is the reduce-scatter input of
  /// this parameter (Plan::params); the runtime lets the operator write there,
  /// so that no copy-in is needed.
  int32_t reduceInputOf = -1;
  /// Operands that it writes in place.
  std::vector<ValueId> mutates = {};
  /// Recomputed in backward, as forward's results were not kept; for messages.
  bool recompute = false;
  /// The schema, as captured, of an operator in a namespace other than aten.
  std::string schema = {};
  bool operator==(const Call &) const = default;

  static constexpr const char *verb = "call";
  static constexpr const char *meaning =
      "calls the operator `namespace::name` or `namespace::name.overload`; one "
      "argument per schema argument; `outs` are its results, those of a "
      "`Tensor[]` in a row, -1 where not used; `mutates` are operands that it "
      "writes in place, `schema` is the schema, as captured, of an operator in "
      "a namespace other than `aten`";
  static constexpr auto fields() {
    return std::tuple(field(verb, asBase<OperatorName>),
                      field("args", &Call::args, Role::Operand),
                      field("outs", &Call::outs, Role::Result),
                      optionalField("reduce_input_of", &Call::reduceInputOf),
                      optionalField("mutates", &Call::mutates, Role::Mutated),
                      optionalField("recompute", &Call::recompute),
                      optionalField("schema", &Call::schema));
  }
};

/// Runs a kernel in place of its calls. Each result has a storage of its own.
struct Fused {
  int32_t kernel = -1;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;

  static constexpr const char *verb = "fused";
  static constexpr const char *meaning =
      "runs the entry of `kernels` that it names, on `ins`, its operands; each "
      "of `outs`, its results, has a storage of its own";
  static constexpr auto fields() {
    return std::tuple(field(verb, &Fused::kernel, Role::Kernel),
                      field("ins", &Fused::ins, Role::Operand),
                      field("outs", &Fused::outs, Role::Result));
  }
};

struct ReadBuffer {
  int32_t buffer = -1;
  ValueId out = -1;

  static constexpr const char *verb = "read_buffer";
  static constexpr const char *meaning =
      "binds a buffer to a value; calls may mutate it";
  static constexpr auto fields() {
    return std::tuple(field(verb, &ReadBuffer::buffer, Role::Buffer),
                      field("out", &ReadBuffer::out, Role::Result));
  }
};

struct ReadParam {
  int32_t param = -1;
  ValueId out = -1;

  static constexpr const char *verb = "read_param";
  static constexpr const char *meaning =
      "binds an ignored parameter to a value";
  static constexpr auto fields() {
    return std::tuple(field(verb, &ReadParam::param, Role::Param),
                      field("out", &ReadParam::out, Role::Result));
  }
};

struct Constant {
  std::string data; ///< numElements values, little-endian bytes
  ValueId out = -1;

  static constexpr const char *verb = "constant";
  static constexpr const char *meaning =
      "a dense literal: the hex digits of its little-endian bytes";
  static constexpr auto fields() {
    return std::tuple(field(verb, &Constant::data, Role::Hex),
                      field("out", &Constant::out, Role::Result));
  }
};

/// outs[i] is the full tensor of units[unit].params[i], valid until the
/// matching Reshard. If it runs only in the first microbatch, outs[i] is
/// kept[i] in later ones.
struct AllGather {
  int32_t unit = -1;
  std::vector<ValueId> outs;
  /// > 0: from what a group of this many neighbours kept at the last Reshard.
  int64_t group = 0;
  /// The results of the unit's last AllGather, which the microbatch before
  /// left; empty if it runs in every microbatch.
  std::vector<ValueId> kept = {};
  /// The buffer of the CopyToDevice or Reshard that it gathers from; -1 if it
  /// gathers from the shards, or if there is no such buffer.
  ValueId source = -1;

  static constexpr const char *verb = "all_gather";
  static constexpr Stream ownStream = Stream::AllGather;
  static constexpr const char *meaning =
      "gathers the unit's parameters, in the unit's order; -1 where not used. "
      "With `group: k`, it gathers from what groups of k neighbours keep. If "
      "it runs only in the first microbatch of a step, `outs` are `kept` in "
      "later ones, which the unit's last `all_gather` of the microbatch before "
      "gathered. `source` is the `buffer` with this rank's part";
  static constexpr auto fields() {
    return std::tuple(
        field(verb, &AllGather::unit, Role::Unit),
        field("outs", &AllGather::outs, Role::Result),
        optionalField("group", &AllGather::group).within(1, 1 << 20),
        optionalField("kept", &AllGather::kept),
        optionalField("source", &AllGather::source, Role::Operand));
  }
};

struct Reshard {
  int32_t unit = -1;
  /// > 0: the ranks of each group of this many neighbours keep the parameters.
  int64_t keep = 0;

  static constexpr const char *verb = "reshard";
  static constexpr const char *meaning =
      "ends the life of the unit's gathered parameters. With `keep: k` the "
      "ranks of each group of k neighbours in a replica keep them between "
      "them: the i-th keeps what the i-th equal share of the replica's ranks "
      "own";
  static constexpr auto fields() {
    return std::tuple(field(verb, &Reshard::unit, Role::Unit),
                      optionalField("keep", &Reshard::keep).within(1, 1 << 20));
  }
};

/// ins[i] is the full gradient of params[i] in its gradDtype, or the sum of an
/// Accumulate; outs[i] is the shard in the parameter's own dtype, or, if it
/// goes to an AllReduce, in reduceDtype. Each gradient is cast to reduceDtype,
/// divided by predivide, and multiplied by premultiply, which is rounded to it
/// too (NCCL's PREMUL_SUM); then a sum in Gloo's order (Messages.h) and a
/// division by postdivide, every result rounded to reduceDtype. An average
/// (FSDP2 over Gloo) is a sum without predivide, divided by Plan::shards().
struct ReduceScatter {
  int32_t unit = -1;
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  /// nullopt: that of the gradients.
  std::optional<DType> reduceDtype = std::nullopt;
  struct Divisors {
    double predivide = 1;
    double postdivide = 1;
    double premultiply = 1;
    bool operator==(const Divisors &) const = default;

    static constexpr auto fields() {
      return std::tuple(field("predivide", &Divisors::predivide),
                        field("postdivide", &Divisors::postdivide),
                        optionalField("premultiply", &Divisors::premultiply));
    }
  };
  /// nullopt: an average.
  std::optional<Divisors> divisors = std::nullopt;

  static constexpr const char *verb = "reduce_scatter";
  static constexpr Stream ownStream = Stream::ReduceScatter;
  static constexpr const char *meaning =
      "averages the full gradients `ins` of `params` of the unit over the "
      "ranks of a replica and keeps this rank's rows: sum, then division by "
      "their number. The other keys are for mixed precision, below";
  static constexpr auto fields() {
    return std::tuple(
        field(verb, &ReduceScatter::unit, Role::Unit),
        field("params", &ReduceScatter::params, Role::Param),
        field("ins", &ReduceScatter::ins, Role::Operand),
        field("outs", &ReduceScatter::outs, Role::Result),
        optionalField("reduce_dtype", &ReduceScatter::reduceDtype),
        optionalField("", &ReduceScatter::divisors));
  }
};

/// ins[i] and outs[i] are shards of the gradient of params[i], ins[i] as
/// ReduceScatter leaves it, outs[i] in the parameter's own dtype.
struct AllReduce {
  int32_t unit = -1;
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  /// nullopt: an average.
  std::optional<double> postdivide = std::nullopt;

  static constexpr const char *verb = "all_reduce";
  static constexpr Stream ownStream = Stream::AllReduce;
  static constexpr const char *meaning =
      "reduces the gradient shards `ins` of `params` of the unit over the "
      "replicas: sum in the dtype of the shards, "
      "then division by their number, or by `postdivide`";
  static constexpr auto fields() {
    return std::tuple(field(verb, &AllReduce::unit, Role::Unit),
                      field("params", &AllReduce::params, Role::Param),
                      field("ins", &AllReduce::ins, Role::Operand),
                      field("outs", &AllReduce::outs, Role::Result),
                      optionalField("postdivide", &AllReduce::postdivide));
  }
};

struct CopyToDevice {
  int32_t unit = -1;

  static constexpr const char *verb = "copy_to_device";
  static constexpr Stream ownStream = Stream::CopyToDevice;
  static constexpr const char *meaning =
      "copies this rank's shards of an offloaded unit to the device, cast to "
      "the dtype in which it is gathered, for the unit's next `all_gather`; "
      "they end with its `reshard`";
  static constexpr auto fields() {
    return std::tuple(field(verb, &CopyToDevice::unit, Role::Unit));
  }
};

struct CopyToHost {
  int32_t unit = -1;
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;

  static constexpr const char *verb = "copy_to_host";
  static constexpr Stream ownStream = Stream::CopyToHost;
  static constexpr const char *meaning =
      "copies the gradient shards `ins` of `params` of an offloaded unit to "
      "the host";
  static constexpr auto fields() {
    return std::tuple(field(verb, &CopyToHost::unit, Role::Unit),
                      field("params", &CopyToHost::params, Role::Param),
                      field("ins", &CopyToHost::ins, Role::Operand),
                      field("outs", &CopyToHost::outs, Role::Result));
  }
};

struct OffloadActivation {
  std::vector<ValueId> ins;
  ValueId out = -1;

  static constexpr const char *verb = "offload_activation";
  static constexpr Stream ownStream = Stream::CopyToHost;
  static constexpr const char *meaning =
      "copies a storage to the host, once: that of the values that it lists, "
      "of which the first owns it and the others are views. The life of the "
      "device's copy ends. `out` is the copy on the host, with the shape and "
      "dtype of the first value, and its `offset` is one in `host_arena`";
  static constexpr auto fields() {
    return std::tuple(field(verb, &OffloadActivation::ins, Role::Operand),
                      field("out", &OffloadActivation::out, Role::Result));
  }
};

struct ReloadActivation {
  ValueId host = -1;
  std::vector<ValueId> outs;

  static constexpr const char *verb = "reload_activation";
  static constexpr Stream ownStream = Stream::CopyToDevice;
  static constexpr const char *meaning =
      "copies the value that it names from the host back to the device: `outs` "
      "are the values that its `offload_activation` took, with their strides, "
      "in one new storage";
  static constexpr auto fields() {
    return std::tuple(field(verb, &ReloadActivation::host, Role::Operand),
                      field("outs", &ReloadActivation::outs, Role::Result));
  }
};

struct Accumulate {
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;

  static constexpr const char *verb = "accumulate";
  static constexpr const char *meaning =
      "adds `ins`, the parameters' whole gradients or their shards, to `outs` "
      "as the microbatch before left them, in the dtype of `outs`; in the "
      "first microbatch `outs` are copies of `ins`";
  static constexpr auto fields() {
    return std::tuple(field(verb, &Accumulate::params, Role::Param),
                      field("ins", &Accumulate::ins, Role::Operand),
                      field("outs", &Accumulate::outs, Role::Result));
  }
};

struct LossScale {
  ValueId out = -1;

  static constexpr const char *verb = "loss_scale";
  static constexpr const char *meaning =
      "binds the step's loss scale, a float32 scalar, to the value that it "
      "names";
  static constexpr auto fields() {
    return std::tuple(field(verb, &LossScale::out, Role::Result));
  }
};

/// torch.amp.GradScaler.unscale_; consumes ins.
struct Unscale {
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  bool deferred = false;

  static constexpr const char *verb = "unscale";
  static constexpr const char *meaning =
      "`GradScaler.unscale_`: the parameters' gradient shards `ins` divided by "
      "the loss scale; with `deferred: true` `outs` are as `ins`, and the "
      "optimizer's fused kernels divide. If an element on any rank is not "
      "finite, the step's `optimizer_step` changes nothing";
  static constexpr auto fields() {
    return std::tuple(field(verb, &Unscale::params, Role::Param),
                      field("ins", &Unscale::ins, Role::Operand),
                      field("outs", &Unscale::outs, Role::Result),
                      optionalField("deferred", &Unscale::deferred));
  }
};

/// torch.nn.utils.clip_grad_norm_; consumes ins.
struct ClipGradNorm {
  std::vector<int32_t> params;
  std::vector<ValueId> ins;
  std::vector<ValueId> outs;
  double maxNorm = 1.0;
  double normType = 2.0; ///< 1, 2 or infinity

  static constexpr const char *verb = "clip_grad_norm";
  static constexpr const char *meaning =
      "`clip_grad_norm_` over the parameters' gradient shards, which are in "
      "the order of `model.parameters()`; `norm_type` is 1.0, 2.0 or infinity";
  static constexpr auto fields() {
    return std::tuple(field(verb, &ClipGradNorm::params, Role::Param),
                      field("ins", &ClipGradNorm::ins, Role::Operand),
                      field("outs", &ClipGradNorm::outs, Role::Result),
                      field("max_norm", &ClipGradNorm::maxNorm),
                      field("norm_type", &ClipGradNorm::normType));
  }
};

struct StageState {
  int32_t unit = -1;

  static constexpr const char *verb = "stage_state";
  static constexpr Stream ownStream = Stream::CopyToHost;
  static constexpr const char *meaning =
      "if a checkpoint of the step before is being taken, copies this rank's "
      "shards of the unit's parameters and of their optimizer state to the "
      "checkpoint's staging memory";
  static constexpr auto fields() {
    return std::tuple(field(verb, &StageState::unit, Role::Unit));
  }
};

/// groups[i] is 0 for Plan::optimizer, n for Plan::paramGroups[n - 1]; empty:
/// all are 0.
struct OptimizerStep {
  std::vector<int32_t> params;
  std::vector<ValueId> grads;
  std::vector<int32_t> groups;

  static constexpr const char *verb = "optimizer_step";
  static constexpr const char *meaning =
      "updates the parameters' shards with the gradient shards, and ignored "
      "parameters whole with this rank's own gradients; `groups` has each "
      "parameter's group, 0 being `optimizer`";
  static constexpr auto fields() {
    return std::tuple(field(verb, &OptimizerStep::params, Role::Param),
                      field("grads", &OptimizerStep::grads, Role::Operand),
                      optionalField("groups", &OptimizerStep::groups));
  }
};

/// Runs on the compute stream. It has no field of its own: the value of its
/// verb is its Instruction::waits.
struct Wait {
  static constexpr const char *verb = "wait";
  static constexpr const char *meaning =
      "lets no later instruction of the compute stream begin before the events "
      "that it lists are complete";
  static constexpr auto fields() { return std::tuple(); }
};

struct WriteParam {
  int32_t param = -1;
  ValueId value = -1;

  static constexpr const char *verb = "write_param";
  static constexpr const char *meaning =
      "in `init`: initialises a parameter; each rank keeps its rows of the "
      "whole value";
  static constexpr auto fields() {
    return std::tuple(field(verb, &WriteParam::param, Role::Param),
                      field("value", &WriteParam::value, Role::Operand));
  }
};

struct WriteBuffer {
  int32_t buffer = -1;
  ValueId value = -1;

  static constexpr const char *verb = "write_buffer";
  static constexpr const char *meaning = "in `init`: initialises a buffer";
  static constexpr auto fields() {
    return std::tuple(field(verb, &WriteBuffer::buffer, Role::Buffer),
                      field("value", &WriteBuffer::value, Role::Operand));
  }
};

/// All kinds, in the order of docs/plan-format.md.
using Kind =
    std::variant<Call, Fused, ReadBuffer, ReadParam, Constant, AllGather,
                 Reshard, ReduceScatter, AllReduce, CopyToDevice, CopyToHost,
                 OffloadActivation, ReloadActivation, Accumulate, LossScale,
                 Unscale, ClipGradNorm, StageState, OptimizerStep, Wait,
                 WriteParam, WriteBuffer>;

/// Calls `fn` with a default one of each kind, in that order.
template <typename FnT> void forEachKind(FnT &&fn) {
  [&]<typename... KindTs>(std::type_identity<std::variant<KindTs...>>) {
    (fn(KindTs()), ...);
  }(std::type_identity<Kind>());
}

struct Instruction {
  Kind kind;
  /// The phase of the step; meaningless in Plan::init and evaluation.
  Phase phase = Phase::Forward;
  /// Index into Plan::modules: the module this came from, for messages.
  int32_t module = -1;
  /// Values not used after this instruction.
  std::vector<ValueId> frees = {};
  /// For forward and backward in a step of several microbatches.
  When when = When::Every;
  Stream stream = Stream::Compute;
  /// Events that must be complete before it begins. In a microbatch in which
  /// the instruction that records an event does not run, that event is
  /// complete.
  std::vector<EventId> waits = {};
  /// The event that its end completes, or -1.
  EventId records = -1;
  /// Memory that it needs beside its results if ranks have memory of their own,
  /// a value of bufferSpec (DeviceBuffers.h); -1 if it needs none.
  ValueId buffer = -1;
  /// Why it is where it is, for a human reader; empty if no reason is given.
  std::string why = {};
  /// Index into Plan::lines: the line of the model that made the call, for
  /// messages.
  int32_t line = -1;

  /// The fields after the kind's own fields and the phase.
  static constexpr auto fields() {
    return std::tuple(
        optionalField("module", &Instruction::module),
        optionalField("line", &Instruction::line),
        optionalField("when", &Instruction::when),
        optionalField("stream", &Instruction::stream),
        optionalField("waits", &Instruction::waits),
        optionalField("records", &Instruction::records),
        optionalField("buffer", &Instruction::buffer, Role::Result),
        optionalField("frees", &Instruction::frees),
        optionalField("why", &Instruction::why, Role::Text));
  }
};

} // namespace fsdp::plan

#endif // FSDP_PLAN_INSTRUCTIONS_H
