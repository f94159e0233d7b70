//===- MixedDevicesTest.cpp - gradients on the device and on the host -----===//
//
// Of a plan that offloads some units: clipping, gradient scaler and optimizer
// take shards of both.
//
//===----------------------------------------------------------------------===//
#include "Support/FakeDevice.h"
#include "fsdp/Runtime/Collectives/DeviceComm.h"
#include "fsdp/Runtime/Optimizer/GradScaler.h"
#include "fsdp/Runtime/Optimizer/GradientClipping.h"
#include "fsdp/Runtime/Optimizer/ShardedOptimizer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fsdp::test {
namespace {

using namespace runtime;

/// The host's memory as that of another device.
class Device : public runtime::Device {
public:
  c10::Device where() const override { return kFake; }
  std::unique_ptr<DeviceMemory> reserve(size_t bytes) override {
    return host->reserve(bytes);
  }
  std::unique_ptr<DeviceMemory> reserveHost(size_t bytes) override {
    ++hostRanges;
    return host->reserveHost(bytes);
  }
  void copy(void *to, const void *from, size_t bytes) override {
    host->copy(to, from, bytes);
  }
  void *allocate(size_t bytes) override { return host->allocate(bytes); }
  c10::DeleterFnPtr deleter() const override { return host->deleter(); }
  void seed(uint64_t seed) override { host->seed(seed); }
  at::Generator generator() override { return host->generator(); }
  std::unique_ptr<Streams> makeStreams() override {
    return host->makeStreams();
  }
  void synchronize() override {}

  std::unique_ptr<runtime::Device> host = makeCpuDevice();
  int hostRanges = 0;
};

/// Two ranks with the same values: a sum is twice them.
class Twins : public Communicator {
public:
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 2; }
  Wait allGather(const std::string &, const std::vector<Part> &) override {
    return {};
  }
  Wait reduceScatter(const std::string &, const at::Tensor &,
                     const at::Tensor &, ReduceOp, double) override {
    return {};
  }
  Wait allReduce(const std::string &, const at::Tensor &tensor,
                 ReduceOp op) override {
    EXPECT_EQ(tensor.device(), kFake);
    if (op == ReduceOp::Sum)
      tensor.mul_(2);
    return {};
  }
  void abort() override {}
};

class TwinTransport : public Transport {
public:
  int64_t rank() const override { return 0; }
  int64_t worldSize() const override { return 2; }
  std::unique_ptr<Communicator> connect(const std::string &,
                                        const std::vector<int64_t> &) override {
    return std::make_unique<Twins>();
  }
  void fail(const std::string &) override {}
  std::string failure() override { return {}; }
};

/// Two ranks, and two units, the first of them on the host.
plan::Plan makePlan() {
  plan::Plan plan;
  plan.worldSize = 2;
  plan.gradScaler = plan::GradScaler{8, 4, 0.25, 2};
  for (int32_t p = 0; p < 2; ++p) {
    std::string name = p == 0 ? "offloaded" : "resident";
    plan.units.push_back({name, {p}, true});
    plan.params.push_back({name, {}, {{6}, plan::DType::Float32}, p, true});
  }
  plan.units[0].cpuOffload = true;
  return plan;
}

class MixedDevices : public testing::Test {
protected:
  c10::InferenceMode guard;
  plan::Plan plan = makePlan();
  Device device;
  DeviceComm comm{plan, device, std::make_shared<TwinTransport>()};

  /// The same numbers, by turns on the host and the device, `first` first.
  static std::vector<at::Tensor> shards(c10::Device first) {
    std::vector<at::Tensor> result;
    at::Generator generator = at::detail::createCPUGenerator(5);
    c10::Device second = first.is_cpu() ? kFake : c10::Device(at::kCPU);
    for (int64_t i = 0; i < 6; ++i)
      result.push_back(at::randn({7 + i}, generator, at::kFloat)
                           .to(i % 2 == 0 ? first : second));
    result.push_back(at::empty({0}, at::device(second)));
    return result;
  }
  static bool areEqual(const at::Tensor &one, const at::Tensor &other) {
    return one.cpu().equal(other.cpu());
  }
};

TEST_F(MixedDevices, ShardsOfOffloadedUnitsAreWhereTheDeviceCopiesFrom) {
  EXPECT_TRUE(comm.shard(0).is_cpu());
  EXPECT_EQ(comm.shard(1).device(), kFake);
  EXPECT_EQ(device.hostRanges, 1);
  comm.shard(0).fill_(3);
  EXPECT_EQ(comm.gatherMasters(0)[0].device(), kFake);
}

TEST_F(MixedDevices, VectorsOfTheHostAreReducedOnTheDevice) {
  for (c10::Device where : {c10::Device(at::kCPU), kFake}) {
    at::Tensor sum = at::full({2}, 3.0, at::device(where));
    comm.allReduce(sum, Reduction::Sum);
    EXPECT_TRUE(areEqual(sum, at::full({2}, 6.0)));
    at::Tensor most = at::tensor({1.f, NAN}).to(where);
    comm.allReduce(most, Reduction::Max);
    EXPECT_EQ(most[0].item<float>(), 1);
    EXPECT_TRUE(std::isnan(most[1].item<float>()));
  }
}

/// The bits of clip_grad_norm_ depend on the order of the norms: those of the
/// second kind of device first.
TEST_F(MixedDevices, AreClippedByOneNorm) {
  for (double normType : {1.0, 2.0, double(INFINITY)})
    for (c10::Device first : {c10::Device(at::kCPU), kFake})
      for (bool inPlace : {false, true}) {
        std::vector<at::Tensor> given = shards(first), ordered;
        for (size_t parity : {1u, 0u})
          for (size_t i = 0; i + 1 < given.size(); ++i)
            if (i % 2 == parity)
              ordered.push_back(given[i].to(kFake, at::kFloat, false, true));
        ordered.insert(ordered.begin() + 3, at::empty({0}, at::device(kFake)));
        ClippedGrads expected = clipGradNorm(comm, ordered, 0.5, normType);
        ClippedGrads clipped =
            clipGradNorm(comm, given, 0.5, normType, inPlace);
        EXPECT_EQ(clipped.norm.device(), first);
        EXPECT_TRUE(areEqual(clipped.norm, expected.norm));
        size_t at[] = {4, 0}; // in `ordered`, of even and odd
        for (size_t i = 0; i + 1 < given.size(); ++i) {
          const at::Tensor &grad = clipped.grads[i];
          EXPECT_EQ(grad.device(), given[i].device());
          EXPECT_TRUE(areEqual(grad, expected.grads[at[i % 2]++]));
          EXPECT_EQ(grad.is_same(given[i]), inPlace);
        }
      }
}

TEST_F(MixedDevices, AreUnscaledAndSearchedTogether) {
  GradScaler scaler(*plan.gradScaler, kFake);
  float infinity = std::numeric_limits<float>::infinity();
  for (std::vector<size_t> bad :
       std::vector<std::vector<size_t>>{{}, {2}, {3}, {0, 3}}) {
    std::vector<at::Tensor> given = shards(at::kCPU), copies;
    for (size_t i : bad)
      given[i][1].fill_(infinity);
    for (const at::Tensor &shard : given)
      copies.push_back(shard.clone());
    float scale = scaler.scale().item<float>();
    std::vector<at::Tensor> out = scaler.unscale(comm, copies, false);
    EXPECT_EQ(scaler.foundInf(), !bad.empty());
    EXPECT_EQ(scaler.found().device(), kFake);
    EXPECT_EQ(scaler.found().item<float>(), bad.empty() ? 0 : 1);
    for (size_t i = 0; i < out.size(); ++i) {
      EXPECT_EQ(out[i].device(), given[i].device());
      EXPECT_TRUE(areEqual(out[i], given[i].mul(1 / scale)));
    }
    scaler.update();
  }
}

TEST_F(MixedDevices, AreUpdatedWhereTheyAre) {
  for (const char *name : {"adamw", "sgd"})
    for (bool fused : {false, true}) {
      SCOPED_TRACE(std::string(name) + (fused ? " fused" : ""));
      plan::Optimizer o;
      o.name = name;
      o.fused = fused;
      o.momentum = 0.9;
      o.weightDecay = 0.1;
      std::vector<at::Tensor> mixed = shards(at::kCPU), host;
      for (const at::Tensor &shard : mixed)
        host.push_back(shard.to(at::kCPU, at::kFloat, false, true));
      ShardedOptimizer one({o}, {}, mixed), other({o}, {}, host);
      for (int step = 0; step < 3; ++step) {
        std::vector<at::Tensor> grads = shards(at::kCPU), ofHost;
        for (at::Tensor &grad : grads) {
          grad.mul_(step - 0.5);
          ofHost.push_back(grad.cpu().clone());
        }
        ShardedOptimizer::Scaling scaling, scalingOfHost;
        if (fused) {
          scaling.gradScale = at::full({}, 3.0, at::device(kFake));
          scaling.foundInf =
              at::full({}, step == 1, at::device(kFake)).to(at::kFloat);
          scalingOfHost.gradScale = scaling.gradScale->cpu();
          scalingOfHost.foundInf = scaling.foundInf->cpu();
        }
        one.step(grads, 1, scaling);
        other.step(ofHost, 1, scalingOfHost);
        for (size_t i = 0; i < mixed.size(); ++i)
          EXPECT_TRUE(areEqual(mixed[i], host[i]));
      }
    }
}

} // namespace
} // namespace fsdp::test
