//===- Interpreter.cpp - what each kind of instruction does ---------------===//
#include "fsdp/Runtime/Execution/Interpreter.h"
#include "AccessAnnotations.h"
#include "fsdp/Plan/Operands.h"
#include "fsdp/Runtime/Devices/SteeredAllocator.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Finite.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Runtime/Optimizer/GradientClipping.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <utility>

namespace fsdp::runtime {

Interpreter::Interpreter(const plan::Plan &plan, Comm &comm, Device &device,
                         std::vector<at::Tensor> buffers)
    : values(plan.values.size()), plan(plan), comm(comm), device(device),
      buffers(std::move(buffers)), host(plan, device), kernels(plan, device),
      gathered(plan.units.size()) {
  c10::InferenceMode guard;
  if (plan.gradScaler)
    scaler.emplace(*plan.gradScaler, device.where());
  for (const plan::Instruction &instruction : plan.instructions) {
    if (std::holds_alternative<plan::ClipGradNorm>(instruction.kind))
      gradNorm = at::zeros({}, at::dtype(at::kDouble).device(device.where()));
    if (const auto *step = std::get_if<plan::OptimizerStep>(&instruction.kind))
      createOptimizer(*step);
  }
}

void Interpreter::createOptimizer(const plan::OptimizerStep &step) {
  if (plan.optimizer.isExternal())
    return;
  std::vector<at::Tensor> shards;
  for (int32_t param : step.params)
    shards.push_back(comm.shard(param));
  optimizer = std::make_unique<ShardedOptimizer>(plan.optimizerGroups(),
                                                 step.groups, shards);
}

std::vector<at::Tensor>
Interpreter::take(const std::vector<plan::ValueId> &ids) const {
  std::vector<at::Tensor> result;
  result.reserve(ids.size());
  for (plan::ValueId id : ids)
    result.push_back(values[id]);
  return result;
}

void Interpreter::run(CallTable &calls, const plan::Call &call, size_t index) {
  // Of the microbatch before, where the plan does not free it.
  for (plan::ValueId out : call.outs)
    if (out != -1)
      values[out].reset();
  void *place =
      call.reduceInputOf >= 0 ? comm.reduceInput(call.reduceInputOf) : nullptr;
  if (!place) {
    calls.run(index, call, values);
    return;
  }
  SteerAllocation steer(
      place, size_t(plan.params[call.reduceInputOf].gradSpec().numBytes()));
  calls.run(index, call, values);
}

at::Tensor Interpreter::makeBuffer(plan::ValueId buffer) {
  if (buffer == -1)
    return {};
  const plan::TensorSpec &spec = plan.values[buffer];
  values[buffer].reset(); // of the microbatch before
  values[buffer] = at::empty(
      spec.shape, at::dtype(scalarType(spec.dtype)).device(device.where()));
  return values[buffer];
}

Interpreter::Wait Interpreter::run(const plan::AllGather &gather) {
  std::vector<at::Tensor> &full = gathered[gather.unit];
  full.clear();
  // Of the microbatch before, where the plan does not free them.
  for (plan::ValueId out : gather.outs)
    if (out != -1)
      values[out].reset();
  at::Tensor source;
  if (gather.source != -1)
    source = values[gather.source];
  Collective begun = comm.allGather(gather.unit, gather.group, source);
  full = std::move(begun.results);
  for (size_t i = 0; i < full.size(); ++i)
    if (gather.outs[i] != -1)
      values[gather.outs[i]] = full[i];
  return std::move(begun.wait);
}

void Interpreter::leaveOut(const plan::Instruction &instruction) {
  if (const auto *gather = std::get_if<plan::AllGather>(&instruction.kind))
    for (size_t i = 0; i < gather->kept.size(); ++i)
      if (gather->outs[i] != -1 && gather->outs[i] != gather->kept[i])
        // They end where the plan frees the results.
        values[gather->outs[i]] = std::exchange(values[gather->kept[i]], {});
}

void Interpreter::run(const plan::Reshard &reshard, plan::ValueId buffer) {
  gathered[reshard.unit].clear();
  comm.reshard(reshard.unit, reshard.keep, makeBuffer(buffer));
}

Interpreter::Wait Interpreter::run(const plan::ReduceScatter &reduce,
                                   plan::ValueId buffer) {
  std::vector<at::Tensor> grads = take(reduce.ins);
  for (size_t i = 0; i < grads.size(); ++i) {
    const plan::Param &param = plan.params[reduce.params[i]];
    // The operators decide what comes out; peers would read past a tensor of
    // another size.
    const plan::TensorSpec &want = plan.values[reduce.ins[i]];
    if (!grads[i].defined() || grads[i].sizes() != want.shape ||
        grads[i].scalar_type() != scalarType(want.dtype))
      throw RunError("the gradient of \"" + param.name +
                     "\" does not have the shape and dtype in the plan");
  }
  Collective begun = comm.reduceScatter(reduce, grads, makeBuffer(buffer));
  for (size_t i = 0; i < begun.results.size(); ++i)
    values[reduce.outs[i]] = std::move(begun.results[i]);
  return std::move(begun.wait);
}

void Interpreter::run(const plan::Accumulate &accumulate) {
  for (size_t i = 0; i < accumulate.params.size(); ++i) {
    at::Tensor &sum = values[accumulate.outs[i]];
    const at::Tensor &term = values[accumulate.ins[i]];
    // Other values may share the first term's storage.
    if (microbatch == 0)
      sum = term.to(scalarType(plan.values[accumulate.outs[i]].dtype),
                    /*non_blocking=*/false, /*copy=*/true,
                    at::MemoryFormat::Contiguous);
    else
      sum.add_(term);
  }
}

void Interpreter::run(const plan::Unscale &unscale) {
  unscaleDeferred = unscale.deferred;
  std::vector<at::Tensor> unscaled =
      scaler->unscale(comm, take(unscale.ins), unscale.deferred);
  for (size_t i = 0; i < unscaled.size(); ++i)
    values[unscale.outs[i]] = std::move(unscaled[i]);
}

void Interpreter::run(const plan::ClipGradNorm &clip) {
  bool inPlace =
      !clip.outs.empty() && plan.values[clip.outs.front()].storage != -1;
  ClippedGrads clipped =
      clipGradNorm(comm, take(clip.ins), clip.maxNorm, clip.normType, inPlace);
  gradNorm.copy_(clipped.norm);
  for (size_t i = 0; i < clipped.grads.size(); ++i)
    values[clip.outs[i]] = std::move(clipped.grads[i]);
}

Interpreter::Wait Interpreter::run(const plan::AllReduce &reduce,
                                   plan::ValueId buffer) {
  Collective begun =
      comm.allReduce(reduce, take(reduce.ins), makeBuffer(buffer));
  for (size_t i = 0; i < begun.results.size(); ++i)
    values[reduce.outs[i]] = std::move(begun.results[i]);
  return std::move(begun.wait);
}

void Interpreter::watchGradients(const plan::OptimizerStep &step) {
  if (sawBadGradient || scaler)
    return;
  for (size_t i = 0; i < step.grads.size() && !sawBadGradient; ++i)
    if (!allFinite(values[step.grads[i]])) {
      badGradient = step.params[i];
      sawBadGradient = true;
    }
}

void Interpreter::run(const plan::OptimizerStep &step) {
  watchGradients(step);
  comm.beginUpdate();
  ShardedOptimizer::Scaling scaling;
  if (unscaleDeferred)
    scaling.gradScale = scaler->scale();
  if (scaler && optimizer && optimizer->isFused())
    scaling.foundInf = scaler->found();
  bool updates = !scaler || scaling.foundInf || !scaler->foundInf();
  if (!optimizer)
    handOutGradients(step, updates);
  else if (updates)
    optimizer->step(take(step.grads), lrFactor, scaling);
  if (publishes)
    comm.publish();
}

void Interpreter::allocateGradients() {
  gradients.clear();
  if (!plan.optimizer.isExternal())
    return;
  for (const plan::Instruction &instruction : plan.instructions)
    if (const auto *step = std::get_if<plan::OptimizerStep>(&instruction.kind))
      for (size_t i = 0; i < step->params.size(); ++i) {
        at::Tensor shard = comm.shard(step->params[i]);
        gradients.emplace_back(
            step->params[i],
            at::empty(shard.sizes(), shard.options().dtype(scalarType(
                                         plan.values[step->grads[i]].dtype))));
      }
}

// The values' own places are others' in the next step.
void Interpreter::handOutGradients(const plan::OptimizerStep &step,
                                   bool areFinite) {
  if (!areFinite)
    return gradients.clear();
  for (size_t i = 0; i < gradients.size(); ++i)
    gradients[i].second.copy_(values[step.grads[i]]);
}

void Interpreter::annotateOperands(const plan::Instruction &instruction) const {
  if constexpr (kThreadSanitizer) {
    for (plan::ValueId value : plan::getOperands(instruction))
      annotateRead(values[value]);
    for (plan::ValueId value : plan::getMutated(instruction))
      annotateWrite(values[value]);
  }
}

void Interpreter::annotateResults(const plan::Instruction &instruction) const {
  if constexpr (kThreadSanitizer)
    if (std::holds_alternative<plan::Call>(instruction.kind) ||
        std::holds_alternative<plan::Fused>(instruction.kind))
      for (plan::ValueId value : plan::getResults(instruction))
        if (plan.values[value].storage == -1)
          annotateWrite(values[value]);
}

Interpreter::Wait Interpreter::execute(const plan::Instruction &instruction,
                                       CallTable &calls, size_t index) {
  struct Visitor {
    Interpreter &e;
    CallTable &calls;
    size_t index;
    plan::ValueId buffer;
    Wait begun = {};
    void operator()(const plan::Call &call) { e.run(calls, call, index); }
    void operator()(const plan::Fused &fused) {
      e.kernels.run(fused, e.values);
    }
    void operator()(const plan::ReadBuffer &read) {
      e.values[read.out] = e.buffers[read.buffer];
    }
    void operator()(const plan::Constant &constant) {
      e.values[constant.out] = calls.constant(index);
    }
    void operator()(const plan::AllGather &gather) { begun = e.run(gather); }
    void operator()(const plan::Reshard &reshard) { e.run(reshard, buffer); }
    void operator()(const plan::ReduceScatter &reduce) {
      begun = e.run(reduce, buffer);
    }
    void operator()(const plan::Accumulate &accumulate) { e.run(accumulate); }
    void operator()(const plan::LossScale &read) {
      e.values[read.out] = e.scaler->scale();
    }
    void operator()(const plan::Unscale &unscale) { e.run(unscale); }
    void operator()(const plan::ClipGradNorm &clip) { e.run(clip); }
    void operator()(const plan::OptimizerStep &step) { e.run(step); }
    // Plan::init alone has these (P13).
    void operator()(const plan::WriteParam &) {}
    void operator()(const plan::WriteBuffer &) {}
    void operator()(const plan::ReadParam &read) {
      e.values[read.out] = e.comm.shard(read.param);
    }
    void operator()(const plan::AllReduce &reduce) {
      begun = e.run(reduce, buffer);
    }
    void operator()(const plan::CopyToDevice &copy) {
      e.comm.copyToDevice(copy.unit, e.makeBuffer(buffer));
    }
    void operator()(const plan::CopyToHost &copy) {
      e.host.copyGradients(copy, e.values);
    }
    void operator()(const plan::OffloadActivation &offload) {
      e.host.offload(offload, e.values);
    }
    void operator()(const plan::ReloadActivation &reload) {
      e.host.reload(reload, e.values);
    }
    void operator()(const plan::StageState &stage) {
      if (e.stage)
        begun = e.stage(stage.unit);
    }
    void operator()(const plan::Wait &) {}
  };
  c10::InferenceMode guard;
  annotateOperands(instruction);
  Visitor visitor{*this, calls, index, instruction.buffer};
  std::visit(visitor, instruction.kind);
  // A collective that nothing waits for, because it is awaited here.
  if (visitor.begun && instruction.stream == plan::Stream::Compute)
    std::exchange(visitor.begun, {})();
  annotateResults(instruction);
  return std::move(visitor.begun);
}

void Interpreter::beginStep(int64_t step) {
  allocateGradients();
  badGradient = -1;
  lrFactor = plan.lrSchedule ? plan.lrSchedule->factor(step) : 1.0;
  updatesBefore = optimizer ? optimizer->steps() : 0;
}

UpdateResult Interpreter::endStep() {
  UpdateResult result;
  double rate =
      optimizer ? optimizer->currentSettings().front().lr : plan.optimizer.lr;
  result.learningRate = rate * lrFactor;
  result.badGradient = badGradient;
  if (gradNorm.defined())
    result.gradNorm = gradNorm.item<double>();
  if (scaler) {
    result.lossScale = scaler->scale().item<double>();
    result.skipped = scaler->foundInf();
    scaler->update();
  }
  // The optimizer counts neither updates that a graph replays nor those that
  // its kernels skip.
  if (optimizer)
    optimizer->setSteps(updatesBefore + (result.skipped ? 0 : 1));
  return result;
}

void Interpreter::beginMicrobatch(int64_t number) {
  microbatch = number;
  if (number > 0)
    comm.beginMicrobatch();
}

Interpreter::HostState Interpreter::aliasState() const {
  auto alias = [](const at::Tensor &tensor) {
    return tensor.defined() && tensor.has_storage()
               ? at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(),
                               tensor.strides(), tensor.options())
               : tensor;
  };
  HostState state{values, gathered};
  for (at::Tensor &tensor : state.values)
    tensor = alias(tensor);
  for (std::vector<at::Tensor> &unit : state.gathered)
    for (at::Tensor &tensor : unit)
      tensor = alias(tensor);
  return state;
}

void Interpreter::restoreState(const HostState &state) {
  values = state.values;
  gathered = state.gathered;
}

} // namespace fsdp::runtime
