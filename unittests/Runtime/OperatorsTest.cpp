//===- OperatorsTest.cpp - the rule over LibTorch's whole registry --------===//
#include "fsdp/Runtime/Operators/Operators.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/core/jit_type.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

std::string nameOf(const c10::OperatorName &name) {
  return name.name +
         (name.overload_name.empty() ? "" : "." + name.overload_name);
}

std::string reason(const char *name, const char *overload = "") {
  return reasonToRefuse(
      c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).schema());
}

/// Calls `visit` with the schema of every operator that has one.
template <typename Visit> void forEachSchema(Visit visit) {
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName &name : dispatcher.getAllOpNames())
    if (auto handle = dispatcher.findSchema(name))
      visit(nameOf(name), handle->schema());
}

bool hasString(const c10::FunctionSchema &schema) {
  for (const c10::Argument &argument : schema.arguments())
    if (argument.type()->str().find("str") != std::string::npos)
      return true;
  return false;
}

bool writes(const c10::FunctionSchema &schema) {
  for (const c10::Argument &argument : schema.arguments())
    if (argument.alias_info() && argument.alias_info()->isWrite())
      return true;
  return false;
}

TEST(Operators, OtherNamespacesAreRefused) {
  std::set<std::string> allowed, refused;
  forEachSchema([&](const std::string &, const c10::FunctionSchema &schema) {
    (reasonToRefuse(schema).empty() ? allowed : refused)
        .emplace(*schema.getNamespace());
  });
  allowed.erase("kernel_check"); // where KernelCheckTest.cpp has allowed it
  EXPECT_THAT(allowed, ElementsAre("aten"));
  EXPECT_THAT(refused, Contains("quantized"));
}

// What the rule refuses of ATen in the registry of this LibTorch. Where another
// version has more, or fewer, somebody is to look at them.
TEST(Operators, OfAtenThoseAreRefusedThatReachBeyondTensors) {
  std::set<std::string> strings, objects, nothing;
  forEachSchema(
      [&](const std::string &name, const c10::FunctionSchema &schema) {
        std::string why = reasonToRefuse(schema);
        // torch 2.11 has overloads for the names of dimensions.
        if (schema.getNamespace() != "aten" || why.empty() ||
            name.find("names") != std::string::npos)
          return;
        if (why.find("string") != std::string::npos)
          strings.insert(name);
        else if (why.find("with a ") != std::string::npos)
          objects.insert(name);
        else
          nothing.insert(name);
      });
  EXPECT_THAT(strings, ElementsAre("aten::_assert_scalar", "aten::_print",
                                   "aten::from_file", "aten::from_file.out"));
  EXPECT_THAT(objects, AllOf(Contains("aten::record_stream"),
                             Contains("aten::set_.source_Storage"),
                             Contains("aten::quantized_lstm.input")));
  EXPECT_THAT(nothing, Contains("aten::_cufft_clear_plan_cache"));
  // Nothing that a model computes with.
  for (const std::string &name : objects)
    EXPECT_TRUE(name.find("Storage") != std::string::npos ||
                name.find("quantized_") != std::string::npos ||
                name == "aten::record_stream" || name == "aten::qscheme" ||
                name == "aten::get_gradients")
        << name;
}

// An allowed operator that takes a string could only leave something outside if
// it had nothing to return and nothing to write: these check and throw.
TEST(Operators, OfThoseWithAStringOnlyAssertionsReturnNothing) {
  std::set<std::string> found, all;
  forEachSchema(
      [&](const std::string &name, const c10::FunctionSchema &schema) {
        if (!reasonToRefuse(schema).empty() || !hasString(schema))
          return;
        all.insert(name);
        if (schema.returns().empty() && !writes(schema))
          found.insert(name);
      });
  EXPECT_THAT(all, AllOf(Contains("aten::gelu"), Contains("aten::einsum"),
                         Contains("aten::div.Tensor_mode")));
  EXPECT_THAT(found, ElementsAre("aten::_assert_async.msg",
                                 "aten::_linalg_check_errors"));
}

TEST(Operators, ComputationsAreAllowed) {
  EXPECT_EQ(reason("aten::mm"), "");
  EXPECT_EQ(reason("aten::zeros"), "");
  EXPECT_EQ(reason("aten::normal_"), "");
  EXPECT_EQ(reason("aten::arange"), "");
  EXPECT_EQ(reason("aten::_assert_async"), "");
  EXPECT_EQ(reason("aten::gelu_"), "");
  EXPECT_EQ(reason("aten::cat"), "");
  EXPECT_EQ(reason("aten::index_put_"), "");
}

TEST(Operators, WhatIsWrittenIsListed) {
  auto found = [](plan::Call call, std::vector<plan::ValueId> mutates) {
    call.mutates = std::move(mutates);
    try {
      findOperator(call);
    } catch (const InputError &error) {
      return std::string(error.what());
    }
    return std::string();
  };
  plan::Call relu{"aten::relu_", "", {{plan::TensorArg{3}}}, {4}};
  EXPECT_EQ(found(relu, {3}), "");
  EXPECT_EQ(found(relu, {4}),
            "argument \"self\" is written, expected value 3 in "
            "\"mutates\"");
  plan::Call each{"aten::_foreach_neg_",
                  "",
                  {{plan::ArgList{{plan::TensorArg{0}}, {plan::TensorArg{5}}}}},
                  {}};
  EXPECT_EQ(found(each, {0, 5}), "");
  EXPECT_THAT(found(each, {0}), HasSubstr("expected value 5 in \"mutates\""));
}

TEST(Operators, PlansAreCheckedInEveryProgram) {
  plan::Call opens{"aten::from_file",
                   "",
                   {{std::string("x")}, {true}, {int64_t(1)}, {}, {}, {}},
                   {-1}};
  for (auto program : {&plan::Plan::init, &plan::Plan::evaluation,
                       &plan::Plan::instructions}) {
    plan::Plan plan = samplePlan(2);
    addInit(plan);
    addEvaluation(plan);
    EXPECT_NO_THROW(checkOperators(plan, "plan.json"));
    plan::Instruction instruction;
    instruction.kind = opens;
    auto &list = plan.*program;
    list.insert(list.begin() + 1, instruction);
    try {
      checkOperators(plan, "plan.json");
      ADD_FAILURE() << "expected an error";
    } catch (const InputError &error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("plan.json: instruction 1: aten::from_file: a plan "
                            "may not call \"aten::from_file\": expected an "
                            "operator that reads a tensor, got one that uses "
                            "what the string \"filename\" names"));
    }
  }
}

} // namespace
} // namespace fsdp::test
