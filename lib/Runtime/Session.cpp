//===- Session.cpp - one rank of an open plan -----------------------------===//
#include "fsdp/Runtime/Session.h"
#include "fsdp/Runtime/Initialise.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>

namespace fsdp::runtime {

Session::Session(const plan::Plan &plan, ShmSegment &segment, int64_t rank,
                 const std::string &folder)
    : plan(plan), segment(segment), folder(folder),
      communication(plan, segment, rank) {
  for (const plan::Buffer &buffer : plan.buffers)
    ownBuffers.push_back(
        at::empty(buffer.spec.shape, scalarType(buffer.spec.dtype)));
}

void Session::load(const SafeTensors &weights) {
  for (size_t p = 0; p < plan.params.size(); ++p) {
    const plan::Param &param = plan.params[p];
    const auto &entry = weights.require(param.name, param.spec, "parameter");
    at::Tensor shard = communication.shard(int32_t(p));
    if (shard.numel() == 0)
      continue;
    int64_t offset = 0;
    if (param.unit != -1)
      offset = plan::shardRows(param.spec.shape[0], plan.shards(),
                               communication.shardIndex())
                   .begin *
               (param.spec.numBytes() / param.spec.shape[0]);
    std::memcpy(shard.mutable_data_ptr(), entry.data.data() + offset,
                shard.nbytes());
  }
  for (size_t b = 0; b < ownBuffers.size(); ++b) {
    const plan::Buffer &buffer = plan.buffers[b];
    const auto &entry = weights.require(buffer.name, buffer.spec, "buffer");
    if (!entry.data.empty())
      std::memcpy(ownBuffers[b].mutable_data_ptr(), entry.data.data(),
                  entry.data.size());
  }
}

void Session::initialise(uint64_t seed) {
  runtime::initialise(plan, communication, ownBuffers, seed);
}

void Session::setParam(int32_t param, const at::Tensor &whole) {
  c10::InferenceMode guard;
  writeParam(plan, communication, param, whole);
}

void Session::start() {
  communication.publish();
  program.emplace(plan, communication,
                  segment.state(communication.rank()).position, ownBuffers,
                  folder);
}

StepResult Session::step(const Executor::Inputs &inputs) {
  return program->runStep(stepsDone++, inputs);
}

void Session::quiesce() { communication.barrier(); }

at::Tensor Session::fullParam(int32_t param) {
  int32_t unit = plan.params[param].unit;
  if (unit == -1)
    return communication.shard(param);
  const std::vector<int32_t> &members = plan.units[unit].params;
  auto index = std::find(members.begin(), members.end(), param);
  return communication.gatherMasters(unit)[size_t(index - members.begin())];
}

} // namespace fsdp::runtime
