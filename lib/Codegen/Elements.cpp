//===- Elements.cpp - what element-wise calls compute ---------------------===//
#include "fsdp/Codegen/Elements.h"
#include "Libdevice.h"
#include "fsdp/Dialect/FSDP.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "llvm/ADT/StringMap.h"

#include <cmath>

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;

//===----------------------------------------------------------------------===//
// Elements
//===----------------------------------------------------------------------===//

Type ElementBuilder::getType(Type element) const {
  return width == 1 ? element : Type(VectorType::get({width}, element));
}

Type ElementBuilder::getHeldType(Type element) {
  return element.isBF16() ? Float32Type::get(element.getContext()) : element;
}

Value ElementBuilder::splat(Value number) {
  if (width == 1)
    return number;
  return vector::BroadcastOp::create(b, getType(number.getType()), number);
}

Value ElementBuilder::constant(Type element, double value) {
  TypedAttr attr = isa<FloatType>(element)
                       ? TypedAttr(b.getFloatAttr(element, value))
                       : b.getIntegerAttr(element, int64_t(value));
  if (width != 1)
    attr = DenseElementsAttr::get(cast<ShapedType>(getType(element)), attr);
  return arith::ConstantOp::create(b, attr);
}

/// To the nearest, ties to even, by integer arithmetic, as ATen; not a number
/// becomes 0xFFFF, as in its vectors.
Value ElementBuilder::roundToBF16(Value f32) {
  if (isForGpu) {
    // One instruction, as ATen's conversion is on a GPU.
    Value rounded = arith::TruncFOp::create(b, getType(b.getBF16Type()), f32);
    return arith::ExtFOp::create(b, f32.getType(), rounded);
  }
  Type i32 = b.getI32Type();
  Value bits = arith::BitcastOp::create(b, getType(i32), f32);
  Value odd = arith::AndIOp::create(
      b, arith::ShRUIOp::create(b, bits, constant(i32, 16)), constant(i32, 1));
  Value up = arith::AddIOp::create(b, odd, constant(i32, 0x7FFF));
  Value rounded = arith::AndIOp::create(b, arith::AddIOp::create(b, bits, up),
                                        constant(i32, -0x10000));
  Value isNaN = arith::CmpFOp::create(b, arith::CmpFPredicate::UNO, f32, f32);
  Value result =
      arith::SelectOp::create(b, isNaN, constant(i32, -0x10000), rounded);
  return arith::BitcastOp::create(b, getType(b.getF32Type()), result);
}

Value ElementBuilder::callFunction(StringRef function, Value f32) {
  if (isForGpu)
    return callImport(("__nv_" + function + "f").str(), f32);
  return callImport(
      ("Sleef_" + function + "f" + llvm::Twine(width) + "_u10").str(), f32);
}

Type ElementBuilder::getStoredType(Type element) {
  Builder builder(element.getContext());
  if (element.isBF16())
    return builder.getI16Type();
  return element.isInteger(1) ? builder.getI8Type() : element;
}

Value ElementBuilder::fromMemory(Type element, Value stored) {
  if (element.isInteger(1))
    return arith::CmpIOp::create(b, arith::CmpIPredicate::ne, stored,
                                 constant(b.getI8Type(), 0));
  if (!element.isBF16())
    return stored;
  Type i32 = b.getI32Type();
  Value bits = arith::ShLIOp::create(
      b, arith::ExtUIOp::create(b, getType(i32), stored), constant(i32, 16));
  return arith::BitcastOp::create(b, getType(b.getF32Type()), bits);
}

Value ElementBuilder::toMemory(Type element, Value held) {
  if (!element.isBF16())
    return held;
  Type i32 = b.getI32Type();
  Value bits = arith::BitcastOp::create(b, getType(i32), held);
  Value high = arith::ShRUIOp::create(b, bits, constant(i32, 16));
  return arith::TruncIOp::create(b, getType(getStoredType(element)), high);
}

//===----------------------------------------------------------------------===//
// Arguments
//===----------------------------------------------------------------------===//

static Type getElementType(Value tensor) {
  return cast<RankedTensorType>(tensor.getType()).getElementType();
}
static Type getResultElement(CallOp call) {
  return getElementType(call.getResult(0));
}

static Attribute getArg(CallOp call, size_t index) {
  ArrayAttr args = call.getArgs();
  return index < args.size() ? args[index] : Attribute();
}

static std::optional<double> getNumber(Attribute attr) {
  if (auto real = dyn_cast_or_null<FloatAttr>(attr))
    return real.getValueAsDouble();
  auto integer = dyn_cast_or_null<IntegerAttr>(attr);
  if (!integer || isa<BoolAttr>(attr))
    return std::nullopt;
  return double(integer.getInt());
}

static bool isTensor(Attribute attr) { return isa_and_nonnull<UnitAttr>(attr); }

/// Argument `index`: an element, or a number in the dtype of the result.
static Value getElement(ElementBuilder &to, CallOp call, ValueRange elements,
                        size_t index) {
  ArrayRef<Attribute> args = call.getArgs().getValue();
  if (isTensor(args[index]))
    return elements[llvm::count_if(args.take_front(index), isTensor)];
  return to.constant(ElementBuilder::getHeldType(getResultElement(call)),
                     *getNumber(args[index]));
}

//===----------------------------------------------------------------------===//
// Functions
//===----------------------------------------------------------------------===//

template <typename OpT>
static Value binary(ElementBuilder &to, CallOp call, ValueRange elements) {
  return OpT::create(to.b, getElement(to, call, elements, 0),
                     getElement(to, call, elements, 1));
}

static Value copy(ElementBuilder &to, CallOp call, ValueRange elements) {
  Value element = elements.front();
  Type held = to.getType(ElementBuilder::getHeldType(getResultElement(call)));
  if (element.getType() == held)
    return element;
  bool widens = getElementTypeOrSelf(held).isF64();
  return widens ? arith::ExtFOp::create(to.b, held, element).getResult()
                : arith::TruncFOp::create(to.b, held, element).getResult();
}

static Value negate(ElementBuilder &to, CallOp, ValueRange elements) {
  return arith::NegFOp::create(to.b, elements[0]);
}
static Value absolute(ElementBuilder &to, CallOp, ValueRange elements) {
  return math::AbsFOp::create(to.b, elements[0]);
}
static Value one(ElementBuilder &to, Value like) {
  return to.constant(getElementTypeOrSelf(like.getType()), 1);
}
static Value reciprocal(ElementBuilder &to, CallOp, ValueRange elements) {
  return arith::DivFOp::create(to.b, one(to, elements[0]), elements[0]);
}
static Value rsqrt(ElementBuilder &to, CallOp, ValueRange elements) {
  return arith::DivFOp::create(to.b, one(to, elements[0]),
                               math::SqrtOp::create(to.b, elements[0]));
}

static Value power(ElementBuilder &to, CallOp call, ValueRange elements) {
  Value base = elements[0];
  Value square = arith::MulFOp::create(to.b, base, base);
  return getNumber(getArg(call, 1)) == 2.0
             ? square
             : arith::MulFOp::create(to.b, square, base).getResult();
}

/// Zero unless the element is above it, or not a number.
static Value relu(ElementBuilder &to, CallOp call, ValueRange elements) {
  Value x = elements[0],
        zero = to.constant(getElementTypeOrSelf(x.getType()), 0);
  Value isBelow =
      arith::CmpFOp::create(to.b, arith::CmpFPredicate::OLT, x, zero);
  return arith::SelectOp::create(to.b, isBelow, zero, x);
}

static Value thresholdBackward(ElementBuilder &to, CallOp call,
                               ValueRange elements) {
  Value grad = elements[0], x = elements[1];
  Type type = getElementTypeOrSelf(x.getType());
  Value limit = to.constant(type, *getNumber(getArg(call, 2)));
  Value isBelow =
      arith::CmpFOp::create(to.b, arith::CmpFPredicate::OLE, x, limit);
  return arith::SelectOp::create(to.b, isBelow, to.constant(type, 0), grad);
}

static Value select(ElementBuilder &to, CallOp, ValueRange elements) {
  return arith::SelectOp::create(to.b, elements[0], elements[1], elements[2]);
}

/// grad * (1 - y * y), contracted.
static Value tanhBackward(ElementBuilder &to, CallOp, ValueRange elements) {
  Value y = elements[1];
  Value slope =
      math::FmaOp::create(to.b, arith::NegFOp::create(to.b, y), y, one(to, y));
  return arith::MulFOp::create(to.b, elements[0], slope);
}

static Value sigmoidBackward(ElementBuilder &to, CallOp, ValueRange elements) {
  Value y = elements[1];
  Value rest = arith::SubFOp::create(to.b, one(to, y), y);
  return arith::MulFOp::create(
      to.b, arith::MulFOp::create(to.b, elements[0], rest), y);
}

/// 1 + exp(-x).
static Value onePlusExp(ElementBuilder &to, Value x) {
  Value minus = arith::NegFOp::create(to.b, x);
  return arith::AddFOp::create(to.b, one(to, x), to.callFunction("exp", minus));
}

static Value sigmoid(ElementBuilder &to, CallOp, ValueRange elements) {
  Value x = elements[0];
  return arith::DivFOp::create(to.b, one(to, x), onePlusExp(to, x));
}

static Value silu(ElementBuilder &to, CallOp, ValueRange elements) {
  Value x = elements[0];
  return arith::DivFOp::create(to.b, x, onePlusExp(to, x));
}

/// (grad * s) * (x * (1 - s) + 1) with s = 1 / (1 + exp(-x)), contracted.
static Value siluBackward(ElementBuilder &to, CallOp call,
                          ValueRange elements) {
  Value x = elements[1];
  Value s = sigmoid(to, call, x);
  Value rest = arith::SubFOp::create(to.b, one(to, x), s);
  Value slope = math::FmaOp::create(to.b, x, rest, one(to, x));
  return arith::MulFOp::create(
      to.b, arith::MulFOp::create(to.b, elements[0], s), slope);
}

/// 0.5 x (1 + tanh(beta (x + kappa x^3))), contracted.
static Value geluTanh(ElementBuilder &to, CallOp, ValueRange elements) {
  constexpr double beta = M_SQRT2 * M_2_SQRTPI * 0.5, kappa = 0.044715;
  Value x = elements[0];
  Type type = getElementTypeOrSelf(x.getType());
  Value cube =
      arith::MulFOp::create(to.b, arith::MulFOp::create(to.b, x, x), x);
  Value sum = math::FmaOp::create(to.b, to.constant(type, kappa), cube, x);
  Value inner = arith::MulFOp::create(to.b, to.constant(type, beta), sum);
  Value half = arith::MulFOp::create(to.b, to.constant(type, 0.5), x);
  return arith::MulFOp::create(
      to.b, half,
      arith::AddFOp::create(to.b, one(to, x), to.callFunction("tanh", inner)));
}

//===----------------------------------------------------------------------===//
// Which calls
//===----------------------------------------------------------------------===//

static bool isFloat(Type element) {
  return element.isF32() || element.isF64() || element.isBF16();
}

/// Whether all tensors have the dtype of the result.
static bool hasOneDtype(CallOp call) {
  return llvm::all_of(call.getOperands(), [&](Value operand) {
    return getElementType(operand) == getResultElement(call);
  });
}

/// Two tensors, or a tensor and a number; on a CPU, ATen keeps a number of a
/// bf16 call in another precision.
static bool takesTwo(CallOp call) {
  Attribute a = getArg(call, 0), b = getArg(call, 1);
  if (!hasOneDtype(call) || !isTensor(a))
    return false;
  return isTensor(b) ||
         (getNumber(b) && (!getResultElement(call).isBF16() || isForGpu(call)));
}

/// On a GPU, ATen multiplies by the inverse of a number.
static bool isQuotient(CallOp call) {
  return takesTwo(call) && (isTensor(getArg(call, 1)) || !isForGpu(call));
}

/// The same, and the factor of the second is 1.
static bool takesTwoUnscaled(CallOp call) {
  return takesTwo(call) && getNumber(getArg(call, 2)) == 1.0;
}

static bool takesOneDtype(CallOp call) {
  return call.getNumOperands() > 0 && hasOneDtype(call);
}
static bool takesOne(CallOp call) {
  return call.getNumOperands() == 1 && hasOneDtype(call);
}
/// Not of bf16, for which ATen's scalar and vector code round differently.
static bool takesOneWide(CallOp call) {
  return takesOne(call) && !getResultElement(call).isBF16();
}
static bool takesTwoTensors(CallOp call) {
  return call.getNumOperands() == 2 && hasOneDtype(call);
}

static bool isSmallPower(CallOp call) {
  std::optional<double> exponent = getNumber(getArg(call, 1));
  return takesOne(call) &&
         (exponent == 2.0 ||
          (exponent == 3.0 && !getResultElement(call).isBF16()));
}

/// Whether ATen's loop over pairs of the widest vectors has nothing left.
static bool fillsVectors(CallOp call) {
  auto type = cast<RankedTensorType>(call.getResult(0).getType());
  return takesOneDtype(call) && !type.getElementType().isF64() &&
         (isForGpu(call) ||
          type.getNumElements() % kElementsOfFullVectors == 0);
}
/// The same of one that calls a function.
static bool fillsVectorsOfFunction(CallOp call) {
  return fillsVectors(call) && (!isForGpu(call) || !getLibdevicePath().empty());
}
static bool isGeluTanh(CallOp call) {
  auto approximate = dyn_cast_or_null<StringAttr>(getArg(call, 1));
  return fillsVectorsOfFunction(call) && approximate && approximate == "tanh";
}

/// On a GPU, ATen rounds a bf16 after each operation of these.
static bool takesTwoGradients(CallOp call) {
  return takesTwoTensors(call) &&
         !(isForGpu(call) && getResultElement(call).isBF16());
}
static bool fillsVectorsOfGradients(CallOp call) {
  return fillsVectors(call) && takesTwoGradients(call);
}

static bool isThreshold(CallOp call) {
  return takesTwoTensors(call) && getNumber(getArg(call, 2)).has_value();
}

/// Between f32 and f64 or bf16, or none.
static bool isCopy(CallOp call) {
  if (call.getNumOperands() != 1)
    return false;
  Type from = getElementType(call.getOperand(0)), to = getResultElement(call);
  return from == to || (from.isF32() && isFloat(to)) ||
         (to.isF32() && isFloat(from));
}

static bool isSelection(CallOp call) {
  if (call.getNumOperands() != 3)
    return false;
  return getElementType(call.getOperand(0)).isInteger(1) &&
         getElementType(call.getOperand(1)) == getResultElement(call) &&
         getElementType(call.getOperand(2)) == getResultElement(call);
}

namespace {
/// Where a call has the bits of ATen's kernels.
enum class Processors { All, CpuAlone };
/// Whether ATen's loop for a CPU computes what is left of its vectors in
/// another way.
enum class Loop { Any, FullVectors };

struct Rule {
  ElementFunction build;
  bool (*takes)(CallOp);
  Loop loop = Loop::Any;
  Processors processors = Processors::All;
};
} // namespace

static const llvm::StringMap<Rule> &getRules() {
  static const llvm::StringMap<Rule> rules = {
      {"aten::_to_copy", {copy, isCopy}},
      {"aten::abs", {absolute, takesOne}},
      {"aten::add.Scalar", {binary<arith::AddFOp>, takesTwoUnscaled}},
      {"aten::add.Tensor", {binary<arith::AddFOp>, takesTwoUnscaled}},
      {"aten::clone", {copy, isCopy}},
      {"aten::div.Scalar", {binary<arith::DivFOp>, isQuotient}},
      {"aten::div.Tensor", {binary<arith::DivFOp>, isQuotient}},
      {"aten::gelu", {geluTanh, isGeluTanh, Loop::FullVectors}},
      {"aten::mul.Scalar", {binary<arith::MulFOp>, takesTwo}},
      {"aten::mul.Tensor", {binary<arith::MulFOp>, takesTwo}},
      {"aten::neg", {negate, takesOne}},
      {"aten::pow.Tensor_Scalar", {power, isSmallPower}},
      {"aten::reciprocal", {reciprocal, takesOne}},
      {"aten::relu", {relu, takesOne, Loop::Any, Processors::CpuAlone}},
      {"aten::rsqrt", {rsqrt, takesOneWide, Loop::Any, Processors::CpuAlone}},
      {"aten::sigmoid", {sigmoid, fillsVectorsOfFunction, Loop::FullVectors}},
      {"aten::sigmoid_backward", {sigmoidBackward, takesTwoGradients}},
      {"aten::silu", {silu, fillsVectorsOfFunction, Loop::FullVectors}},
      {"aten::silu_backward",
       {siluBackward, fillsVectorsOfFunction, Loop::FullVectors}},
      {"aten::sub.Scalar", {binary<arith::SubFOp>, takesTwoUnscaled}},
      {"aten::sub.Tensor", {binary<arith::SubFOp>, takesTwoUnscaled}},
      {"aten::tanh_backward",
       {tanhBackward, fillsVectorsOfGradients, Loop::FullVectors}},
      // ptxas takes abs(x) >= 0 for true, also where x is not a number.
      {"aten::threshold_backward",
       {thresholdBackward, isThreshold, Loop::Any, Processors::CpuAlone}},
      {"aten::where.self", {select, isSelection}},
  };
  return rules;
}

bool mlir::fsdp::isForGpu(Operation *op) {
  auto module = dyn_cast<ModuleOp>(op);
  if (!module)
    module = op->getParentOfType<ModuleOp>();
  auto from = module
                  ? module->getAttrOfType<DictionaryAttr>(capturedForAttrName)
                  : DictionaryAttr();
  auto device = from ? from.getAs<StringAttr>("device") : StringAttr();
  return device && device == "cuda";
}

ElementFunction mlir::fsdp::findElementFunction(CallOp call) {
  if (call.getNumResults() != 1 || call.getRandom() || call.getSchema() ||
      (call.getMutates() && !call.getMutates()->empty()) ||
      call.getViewedOperand(0) || !isFloat(getResultElement(call)))
    return nullptr;
  auto rule = getRules().find(call.getCallee());
  if (rule == getRules().end() || !rule->second.takes(call) ||
      (rule->second.processors == Processors::CpuAlone && isForGpu(call)))
    return nullptr;
  return rule->second.build;
}

bool mlir::fsdp::needsFullVectors(CallOp call) {
  auto rule = getRules().find(call.getCallee());
  return rule != getRules().end() && rule->second.loop == Loop::FullVectors &&
         !isForGpu(call);
}

Value mlir::fsdp::buildElement(ElementBuilder &to, CallOp call,
                               ValueRange elements) {
  Value element = findElementFunction(call)(to, call, elements);
  bool copies = call.getNumOperands() == 1 &&
                getElementType(call.getOperand(0)) == getResultElement(call) &&
                element == elements[0];
  return getResultElement(call).isBF16() && !copies ? to.roundToBF16(element)
                                                    : element;
}
