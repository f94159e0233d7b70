//===- StreamsTest.cpp - what orders the streams of a GPU -----------------===//
//
// A slow kernel on one stream, and work on another that reads its result: at
// once, if nothing orders it.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Devices/Streams.h"
#include "CudaFixture.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <set>

namespace fsdp::test {
namespace {

using namespace runtime;
using plan::Stream;

class CudaStreamsTest : public testing::Test {
protected:
  at::TensorOptions onGpu() { return at::device(gpu().where()); }

  static c10::cuda::CUDAStream current() {
    return c10::cuda::getCurrentCUDAStream();
  }

  /// Some ten milliseconds, then `value` into `to`.
  Streams::Work slowFill(at::Tensor to, double value) {
    return [this, to, value] {
      for (int i = 0; i < 20; ++i)
        at::mm_out(product, matrix, matrix);
      to.fill_(value);
      return Streams::Wait();
    };
  }
  static Streams::Work copy(at::Tensor to, const at::Tensor &from) {
    return [to, from] {
      to.copy_(from);
      return Streams::Wait();
    };
  }

  /// What is loaded at the first call may wait for the device.
  void SetUp() override {
    slowFill(value, 0)();
    copied.copy_(value).fill_(-1);
    gpu().synchronize();
  }

  at::Tensor matrix = at::rand({4096, 4096}, onGpu());
  at::Tensor product = at::empty_like(matrix);
  at::Tensor value = at::zeros({1 << 20}, onGpu());
  at::Tensor copied = at::full({1 << 20}, -1.0, onGpu());
  std::unique_ptr<Streams> streams = gpu().makeStreams();
};

TEST_F(CudaStreamsTest, RunAtTheSameTimeWhereNoEventOrdersThem) {
  streams->submit(Stream::Compute, {}, -1, slowFill(value, 1));
  streams->submit(Stream::AllGather, {}, -1, copy(copied, value));
  gpu().synchronize();
  EXPECT_EQ(copied[0].item<float>(), 0);
}

TEST_F(CudaStreamsTest, WaitForTheLastRecordOfAnEvent) {
  for (int round = 1; round <= 3; ++round) {
    streams->submit(Stream::Compute, {}, 4, slowFill(value, round));
    // 9 is recorded by none, and complete.
    streams->submit(Stream::ReduceScatter, {9, 4}, 5, copy(copied, value));
    streams->submit(Stream::Compute, {5}, -1, slowFill(value, 0));
    gpu().synchronize();
    EXPECT_EQ(copied[0].item<float>(), round);
  }
}

TEST_F(CudaStreamsTest, EachRunsInOrderOnAStreamOfItsOwn) {
  std::set<c10::StreamId> ids = {current().id()};
  for (size_t stream = 0; stream < plan::kNumStreams; ++stream)
    streams->submit(Stream(stream), {}, -1, [&] {
      ids.insert(current().id());
      return Streams::Wait();
    });
  EXPECT_EQ(ids.size(), plan::kNumStreams + 1);
  streams->submit(Stream::AllGather, {}, -1, slowFill(value, 2));
  streams->submit(Stream::AllGather, {}, -1, copy(copied, value));
  gpu().synchronize();
  EXPECT_EQ(copied[0].item<float>(), 2);
}

TEST_F(CudaStreamsTest, BeginAfterWhatTheCallerSubmitted) {
  c10::cuda::CUDAStream caller = current();
  slowFill(value, 3)();
  streams->submit(Stream::CopyToHost, {}, -1, copy(copied, value));
  EXPECT_EQ(current(), caller);
  gpu().synchronize();
  EXPECT_EQ(copied[0].item<float>(), 3);
}

TEST_F(CudaStreamsTest, ATimersMarksAreOfTheStreams) {
  std::unique_ptr<Timer> timer = gpu().makeTimer(4);
  auto mark = [&](size_t index) {
    return [&timer, index] {
      timer->mark(index);
      return Streams::Wait();
    };
  };
  timer->start();
  streams->submit(Stream::Compute, {}, -1, mark(0));
  streams->submit(Stream::Compute, {}, 0, slowFill(value, 1));
  streams->submit(Stream::Compute, {}, -1, mark(1));
  streams->submit(Stream::AllGather, {}, -1, mark(2));
  streams->submit(Stream::AllGather, {0}, -1, mark(3));
  gpu().synchronize();
  EXPECT_GE(timer->seconds(0), 0);
  EXPECT_GT(timer->seconds(1), timer->seconds(0));
  // Nothing orders it behind the slow kernel.
  EXPECT_LT(timer->seconds(2), timer->seconds(1));
  EXPECT_GT(timer->seconds(3), timer->seconds(2));
}

TEST_F(CudaStreamsTest, SynchronizeOrdersAllThatComesNext) {
  at::Tensor second = at::full_like(copied, -1);
  streams->submit(Stream::Compute, {}, -1, slowFill(value, 4));
  streams->synchronize();
  copied.copy_(value);
  streams->submit(Stream::AllReduce, {}, -1, copy(second, value));
  gpu().synchronize();
  EXPECT_EQ(copied[0].item<float>(), 4);
  EXPECT_EQ(second[0].item<float>(), 4);
}

TEST_F(CudaStreamsTest, AreCapturedInAGraphFromTheCurrentStream) {
  auto step = [&] {
    streams->submit(Stream::Compute, {}, 1, slowFill(value, 6));
    streams->submit(Stream::AllGather, {1}, 2, copy(copied, value));
    streams->submit(Stream::Compute, {2}, -1, slowFill(value, 0));
    streams->submit(Stream::CopyToHost, {}, -1, [] { return Streams::Wait(); });
    streams->synchronize();
  };
  c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  step();
  gpu().synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  step();
  graph.capture_end();
  copied.fill_(-1);
  graph.replay();
  gpu().synchronize();
  EXPECT_EQ(copied[0].item<float>(), 6);
  EXPECT_EQ(value[0].item<float>(), 0);
}

TEST_F(CudaStreamsTest, GoOnAfterACaptureThatFails) {
  auto allocate = [&] { at::Tensor made = at::full({1 << 20}, 7.0, onGpu()); };
  // The work itself fails; a call that no capture permits makes it invalid.
  EXPECT_THROW(gpu().capture([&] {
    allocate();
    throw RunError("no more");
  }),
               RunError);
  EXPECT_ANY_THROW(gpu().capture([&] {
    allocate();
    (void)cudaStreamSynchronize(current().stream());
  }));
  // Memory and captures are as before.
  at::Tensor after = at::full({1 << 20}, 3.0, onGpu());
  allocate();
  gpu().synchronize();
  EXPECT_EQ(after[0].item<float>(), 3);
  std::unique_ptr<DeviceGraph> graph =
      gpu().capture([&] { copied.copy_(value); });
  value.fill_(9);
  graph->replay();
  gpu().synchronize();
  EXPECT_EQ(copied[0].item<float>(), 9);
}

TEST_F(CudaStreamsTest, KeepFreedMemoryUntilAllAreDoneWithIt) {
  at::Tensor gathered;
  streams->submit(Stream::AllGather, {}, 0, [&] {
    gathered = at::full({1 << 20}, 7.0, onGpu());
    return Streams::Wait();
  });
  streams->submit(Stream::Compute, {0}, -1, [&] {
    slowFill(value, 1)();
    copied.copy_(gathered);
    return Streams::Wait();
  });
  gathered.reset();
  streams->submit(Stream::AllGather, {}, -1, [&] {
    at::full({1 << 20}, 8.0, onGpu());
    return Streams::Wait();
  });
  gpu().synchronize();
  EXPECT_EQ(copied[0].item<float>(), 7);
}

TEST_F(CudaStreamsTest, CallTheWaitBeforeTheEvent) {
  streams->submit(Stream::AllGather, {}, 0, [&]() -> Streams::Wait {
    return [&] { slowFill(value, 5)(); };
  });
  streams->submit(Stream::Compute, {0}, -1, copy(copied, value));
  gpu().synchronize();
  EXPECT_EQ(copied[0].item<float>(), 5);
}

TEST_F(CudaStreamsTest, LetTheHostWaitForEventsAndAStream) {
  auto pinned = gpu().reserveHost(2 * sizeof(float));
  auto *onHost = reinterpret_cast<float *>(pinned->base());
  auto copyTo = [&](float *to) {
    return [this, to] {
      gpu().copy(to, value.const_data_ptr(), sizeof(float));
      return Streams::Wait();
    };
  };
  onHost[0] = onHost[1] = -1;
  streams->submit(Stream::Compute, {}, 1, slowFill(value, 8));
  streams->submit(Stream::CopyToHost, {1}, 2, copyTo(onHost));
  streams->awaitOnHost(Stream::Compute, {2});
  EXPECT_EQ(onHost[0], 8);
  streams->submit(Stream::Compute, {}, -1, slowFill(value, 9));
  streams->submit(Stream::Compute, {}, -1, copyTo(onHost + 1));
  streams->awaitOnHost(Stream::Compute, {});
  EXPECT_EQ(onHost[1], 9);
}

TEST_F(CudaStreamsTest, ThrowWhatWorkThrewAndRestoreTheStream) {
  c10::cuda::CUDAStream caller = current();
  EXPECT_THROW(streams->submit(Stream::Compute, {}, 0,
                               []() -> Streams::Wait { throw RunError("no"); }),
               RunError);
  EXPECT_EQ(current(), caller);
}

} // namespace
} // namespace fsdp::test
