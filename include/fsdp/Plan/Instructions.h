//===- Instructions.h - what the programs of a plan consist of ------------===//
//
// One struct for each kind of instruction, and what all kinds have.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_INSTRUCTIONS_H
#define FSDP_PLAN_INSTRUCTIONS_H

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

/// Calls one operator.
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
  /// Of an operator in another namespace than aten: its schema, as captured.
  std::string schema = {};
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

} // namespace fsdp::plan

#endif // FSDP_PLAN_INSTRUCTIONS_H
