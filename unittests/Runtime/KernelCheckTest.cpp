//===- KernelCheckTest.cpp - kernels that do not do what is said of them --===//
#include "fsdp/Runtime/Operators/KernelCheck.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"
#include "fsdp/Runtime/Operators/Operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <functional>

namespace fsdp::test {
namespace {

using namespace runtime;
using at::Tensor;
using testing::HasSubstr;

/// What the kernel of kernel_check::f does.
std::function<std::tuple<Tensor, Tensor>(const Tensor &, const Tensor &)> body;

std::tuple<Tensor, Tensor> kernel(const Tensor &x, const Tensor &y) {
  return body(x, y);
}

TORCH_LIBRARY(kernel_check, m) {
  m.def("f(Tensor x, Tensor(a!) y) -> (Tensor, Tensor)", &kernel);
  m.def("random(Tensor x, Tensor(a!) y) -> (Tensor, Tensor)", &kernel,
        {at::Tag::nondeterministic_seeded});
  m.def("declared(Tensor x, Tensor(a!) y) -> (Tensor, Tensor)");
}

class KernelCheck : public testing::Test {
protected:
  /// Value 0 and 1 are the operands, 2 and 3 the results.
  void SetUp() override {
    allowOperators(
        {"kernel_check::f", "kernel_check::random", "kernel_check::declared"});
    for (int i = 0; i < 4; ++i) {
      plan::Value value;
      value.shape = {2, 3};
      plan.values.push_back(value);
    }
    use("f");
    body = [](const Tensor &x, const Tensor &y) {
      y.add_(x);
      return std::tuple(x + 1, x + 2);
    };
  }

  void use(const std::string &name) {
    plan::Call call{"kernel_check::" + name,
                    "",
                    {{plan::TensorArg{0}}, {plan::TensorArg{1}}},
                    {2, 3}};
    call.mutates = {1};
    call.schema = call.op + "(Tensor x, Tensor(a!) y) -> (Tensor, Tensor)";
    plan.instructions.resize(1);
    plan.instructions[0].kind = call;
  }

  void run(int times = 1) {
    c10::InferenceMode guard;
    CallTable calls(plan, plan.instructions);
    for (int i = 0; i < times; ++i) {
      values.resize(4);
      values[0] = at::ones({2, 3});
      values[1] = at::ones({2, 3});
      calls.run(0, std::get<plan::Call>(plan.instructions[0].kind), values);
    }
  }

  std::string errorOf(int times = 1) {
    try {
      run(times);
    } catch (const std::exception &error) {
      return error.what();
    }
    return "no error";
  }

  plan::Plan plan;
  std::vector<Tensor> values;
};

TEST_F(KernelCheck, KernelThatKeepsToItsSchema) {
  EXPECT_EQ(errorOf(3), "no error");
  EXPECT_TRUE(values[1].equal(at::ones({2, 3}) * 2));
}

TEST_F(KernelCheck, ResultsAreAsTheFakeKernelSays) {
  body = [](const Tensor &x, const Tensor &) {
    return std::tuple(x + 1, at::empty({3, 2}));
  };
  EXPECT_EQ(errorOf(), "result 1: expected float32[2, 3] of strides [3, 1] as "
                       "its fake kernel says, got float32[3, 2] of strides "
                       "[2, 1]");
  body = [](const Tensor &x, const Tensor &) {
    return std::tuple(at::empty({3, 2}).t(), x + 1);
  };
  EXPECT_THAT(errorOf(), HasSubstr("got float32[2, 3] of strides [1, 2]"));
  body = [](const Tensor &x, const Tensor &) {
    return std::tuple((x + 1).to(at::kDouble), x + 1);
  };
  EXPECT_THAT(errorOf(), HasSubstr("got float64[2, 3]"));
  body = [](const Tensor &x, const Tensor &) {
    return std::tuple(x + 1, Tensor());
  };
  EXPECT_THAT(errorOf(), HasSubstr("got nothing"));
}

TEST_F(KernelCheck, ResultsAreLookedAtInEachRun) {
  int runs = 0;
  body = [&](const Tensor &x, const Tensor &) {
    return std::tuple(x + 1, ++runs == 3 ? at::empty({1}) : x + 1);
  };
  EXPECT_THAT(errorOf(3), HasSubstr("got float32[1]"));
}

TEST_F(KernelCheck, ResultsHaveMemoryOfTheirOwn) {
  body = [](const Tensor &x, const Tensor &) { return std::tuple(x, x + 1); };
  EXPECT_THAT(errorOf(), HasSubstr("result 0 shares memory with argument "
                                   "\"x\", expected new memory"));
  body = [](const Tensor &x, const Tensor &y) {
    return std::tuple(x + 1, at::from_blob(y.mutable_data_ptr(), {2, 3}));
  };
  EXPECT_THAT(errorOf(), HasSubstr("result 1 shares memory with argument \"y"));
  body = [](const Tensor &x, const Tensor &) {
    Tensor one = x + 1;
    return std::tuple(one, one);
  };
  EXPECT_THAT(errorOf(), HasSubstr("result 1 shares memory with result 0"));
}

TEST_F(KernelCheck, OperandsAreWrittenAsTheSchemaSays) {
  body = [](const Tensor &x, const Tensor &) {
    x[1][2].add_(1);
    return std::tuple(x + 1, x + 2);
  };
  EXPECT_THAT(errorOf(), HasSubstr("argument \"x\" was written, expected it as "
                                   "it was: its schema does not say so"));
  body = [](const Tensor &x, const Tensor &y) {
    const_cast<Tensor &>(y).unsqueeze_(0);
    return std::tuple(x + 1, x + 2);
  };
  EXPECT_THAT(errorOf(), HasSubstr("argument \"y\" has another shape"));
}

TEST_F(KernelCheck, NumbersAreDrawnAsTheTagSays) {
  body = [](const Tensor &x, const Tensor &) {
    return std::tuple(x + at::rand({2, 3}), x + 1);
  };
  EXPECT_THAT(errorOf(), HasSubstr("drew random numbers, expected none: it "
                                   "lacks the tag nondeterministic_seeded"));
  use("random");
  EXPECT_EQ(errorOf(2), "no error");
}

TEST_F(KernelCheck, OperatorsThatMayNotRun) {
  use("declared");
  EXPECT_THAT(errorOf(), HasSubstr("have no kernel for it"));
  use("absent");
  EXPECT_THAT(errorOf(), HasSubstr("no C++ kernel of operator "
                                   "\"kernel_check::absent\""));
  use("f");
  auto &call = std::get<plan::Call>(plan.instructions[0].kind);
  call.schema = "kernel_check::f(Tensor x) -> Tensor";
  EXPECT_THAT(errorOf(),
              HasSubstr("expected the schema \"kernel_check::f("
                        "Tensor x) -> Tensor\" as captured, got \""));
}

} // namespace
} // namespace fsdp::test
