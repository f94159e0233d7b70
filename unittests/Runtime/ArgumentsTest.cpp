//===- ArgumentsTest.cpp - conversion to schema types ---------------------===//
#include "fsdp/Runtime/Operators/Arguments.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using namespace plan;
using runtime::ArgTemplate;

const c10::Argument &formal(const char *op, const char *overload,
                            const char *name) {
  auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op, overload);
  const auto &schema = handle.schema();
  return schema.arguments().at(size_t(*schema.argumentIndexWithName(name)));
}

c10::IValue convert(const Arg &arg, const c10::Argument &formal) {
  return ArgTemplate(arg, formal).instantiate({at::ones({2}), at::ones({3})});
}

std::string errorOf(const Arg &arg, const c10::Argument &formal) {
  try {
    ArgTemplate converted(arg, formal);
  } catch (const runtime::InputError &error) {
    return error.what();
  }
  return "no error";
}

TEST(Arguments, ConvertsScalars) {
  const auto &alpha = formal("aten::add", "Tensor", "alpha");
  EXPECT_TRUE(convert({int64_t(2)}, alpha).isInt());
  EXPECT_TRUE(convert({2.0}, alpha).isDouble());
  // An integer where the schema says float.
  const auto &eps = formal("aten::native_layer_norm", "", "eps");
  EXPECT_EQ(convert({int64_t(1)}, eps).toDouble(), 1.0);
  const auto &keepdim = formal("aten::sum", "dim_IntList", "keepdim");
  EXPECT_TRUE(convert({true}, keepdim).isBool());
  EXPECT_TRUE(convert({int64_t(1)}, keepdim).isBool());
  EXPECT_EQ(errorOf({1.5}, keepdim), "expected bool, got a float");
}

TEST(Arguments, ConvertsComplexNumbers) {
  const auto &alpha = formal("aten::add", "Tensor", "alpha");
  c10::IValue value = convert({std::complex<double>(1, -2)}, alpha);
  EXPECT_EQ(value.toScalar().toComplexDouble(), c10::complex<double>(1, -2));
  const auto &keepdim = formal("aten::sum", "dim_IntList", "keepdim");
  EXPECT_EQ(errorOf({std::complex<double>(1, 0)}, keepdim),
            "expected bool, got a complex number");
}

TEST(Arguments, ConvertsOptionals) {
  const auto &dtype = formal("aten::sum", "dim_IntList", "dtype");
  EXPECT_TRUE(convert({NoneArg{}}, dtype).isNone());
  EXPECT_EQ(convert({int64_t(6)}, dtype).toScalarType(), at::kFloat);
  const auto &weight = formal("aten::native_layer_norm", "", "weight");
  EXPECT_TRUE(convert({NoneArg{}}, weight).isNone());
  EXPECT_EQ(convert({TensorArg{1}}, weight).toTensor().numel(), 3);
  EXPECT_EQ(errorOf({NoneArg{}}, formal("aten::mm", "", "self")),
            "expected Tensor, got None");
}

TEST(Arguments, AttentionsBackwardTakesWhatItsForwardDidNotMake) {
  const char *name = "aten::_scaled_dot_product_flash_attention_backward";
  EXPECT_FALSE(
      convert({NoneArg{}}, formal(name, "", "cum_seq_q")).toTensor().defined());
  EXPECT_EQ(errorOf({NoneArg{}}, formal(name, "", "logsumexp")),
            "expected Tensor, got None");
}

TEST(Arguments, ADeviceIsThatOfTheRank) {
  const auto &device = formal("aten::empty", "memory_format", "device");
  EXPECT_EQ(convert({plan::DeviceArg{}}, device).toDevice(), at::kCPU);
  ArgTemplate onGpu({plan::DeviceArg{}}, device, at::Device(at::kCUDA, 1));
  EXPECT_EQ(onGpu.instantiate({}).toDevice(), at::Device(at::kCUDA, 1));
}

TEST(Arguments, ConvertsLists) {
  const auto &dim = formal("aten::sum", "dim_IntList", "dim");
  EXPECT_TRUE(convert({ArgList{{int64_t(0)}, {int64_t(1)}}}, dim).isIntList());
  EXPECT_TRUE(convert({ArgList{}}, dim).isIntList());
  EXPECT_EQ(convert({int64_t(0)}, dim).toIntVector(), std::vector<int64_t>{0});
  const auto &mask =
      formal("aten::native_layer_norm_backward", "", "output_mask");
  EXPECT_TRUE(convert({ArgList{{true}, {true}, {false}}}, mask).isBoolList());
  const auto &tensors = formal("aten::cat", "", "tensors");
  EXPECT_EQ(convert({ArgList{{TensorArg{1}}, {TensorArg{0}}}}, tensors)
                .toTensorVector()
                .at(0)
                .numel(),
            3);
  EXPECT_EQ(errorOf({ArgList{{NoneArg{}}}}, tensors),
            "expected Tensor, got None");
  const auto &indices = formal("aten::index", "Tensor", "indices");
  auto list = convert({ArgList{{NoneArg{}}, {TensorArg{0}}}}, indices)
                  .toOptionalTensorVector();
  EXPECT_FALSE(list.at(0).has_value());
  EXPECT_TRUE(list.at(1).has_value());
}

TEST(Arguments, ConvertsDevices) {
  const auto &device = formal("aten::empty", "memory_format", "device");
  EXPECT_EQ(convert({DeviceArg{}}, device).toDevice(),
            c10::Device(c10::DeviceType::CPU));
  EXPECT_EQ(errorOf({std::string("cpu")}, device),
            "expected Device, got a string");
}

} // namespace
} // namespace fsdp::test
