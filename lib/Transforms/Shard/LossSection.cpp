//===- LossSection.cpp - what is computed row by row around a loss --------===//
#include "LossSection.h"

using namespace mlir;
using namespace mlir::fsdp;
using aten::CallOp;
using Checked = LossSection::Checked;
using Obstacle = LossSection::Obstacle;
using Role = LossSection::Role;

namespace {
RankedTensorType getType(Value value) {
  return cast<RankedTensorType>(value.getType());
}
int64_t getLastSize(Value value) { return getType(value).getShape().back(); }

bool isCall(CallOp call, ArrayRef<StringRef> callees) {
  return llvm::is_contained(callees, call.getCallee());
}

/// Operators that compute each element of the result from the elements in its
/// place, of operands that broadcast.
bool isElementwise(CallOp call) {
  return isCall(call, {"aten::add.Tensor",  "aten::add.Scalar",
                       "aten::sub.Tensor",  "aten::sub.Scalar",
                       "aten::mul.Tensor",  "aten::mul.Scalar",
                       "aten::div.Tensor",  "aten::div.Scalar",
                       "aten::neg",         "aten::tanh",
                       "aten::exp",         "aten::_to_copy",
                       "aten::clone",       "aten::tanh_backward",
                       "aten::sigmoid",     "aten::sigmoid_backward",
                       "aten::clamp",       "aten::pow.Tensor_Scalar",
                       "aten::where.self",  "aten::masked_fill.Scalar",
                       "aten::le.Scalar",   "aten::lt.Scalar",
                       "aten::ge.Scalar",   "aten::gt.Scalar",
                       "aten::logical_and", "aten::threshold_backward"});
}

/// Whether all rows read the same elements of `operand`.
bool isShared(Value operand) {
  RankedTensorType type = getType(operand);
  return type.getRank() <= 1 ||
         (type.getRank() == 2 && type.getDimSize(0) == 1);
}

bool isAbsent(CallOp call, size_t arg) {
  return isa<aten::NoneAttr>(call.getArgs()[arg]);
}

bool isLastDimension(CallOp call, size_t arg) {
  int64_t rank = getType(call.getResult(0)).getRank();
  auto dim = dyn_cast<IntegerAttr>(call.getArgs()[arg]);
  return dim && (dim.getInt() == -1 || dim.getInt() == rank - 1);
}

/// Whether a sum is over all dimensions except the last.
bool sumsRows(CallOp call) {
  auto dims = dyn_cast<ArrayAttr>(call.getArgs()[1]);
  int64_t rank = getType(call.getOperand(0)).getRank();
  if (!dims)
    return false;
  SmallVector<int64_t> sorted;
  for (auto dim : dims.getAsRange<IntegerAttr>())
    sorted.push_back(dim.getInt() < 0 ? dim.getInt() + rank : dim.getInt());
  llvm::sort(sorted);
  return llvm::equal(sorted, llvm::seq<int64_t>(rank - 1));
}
} // namespace

LossSection::LossSection(ProgramOp program, CallOp loss)
    : program(program), block(*loss->getBlock()), storages(block), loss(loss),
      rows(getType(loss.getOperand(0)).getDimSize(0)),
      width(getType(loss.getOperand(0)).getDimSize(1)) {}

Checked LossSection::analyze() {
  if (!isAbsent(loss, 2))
    return Obstacle{loss, "has weights for the classes"};
  if (Checked obstacle = add(loss.getOperand(0), /*transposed=*/false))
    return obstacle;
  while (!worklist.empty())
    if (Checked obstacle = addCallsOf(worklist.pop_back_val()))
      return obstacle;
  llvm::sort(calls, [](CallOp a, CallOp b) { return a->isBeforeInBlock(b); });
  seed = findBackwardSeed(program);
  if (!seed)
    return Obstacle{loss, "is not what backward begins with"};
  anchor = findAnchor();
  for (CallOp call : calls) {
    for (Value operand : call.getOperands())
      if (Checked obstacle = checkOperand(call, operand))
        return obstacle;
    for (Operation *user : call->getUsers())
      if (!roles.contains(dyn_cast<CallOp>(user)) &&
          user->isBeforeInBlock(anchor))
        return Obstacle{user, "needs all rows before the loss"};
  }
  return std::nullopt;
}

int64_t LossSection::getNumBytes() const {
  int64_t bytes = 0;
  for (const auto &entry : wide)
    if (storages.getOwner(entry.first) == entry.first)
      bytes += fsdp::getNumBytes(getType(entry.first));
  return bytes;
}

//===----------------------------------------------------------------------===//
// Shapes
//===----------------------------------------------------------------------===//

bool LossSection::isMade(Value value) const {
  auto call = value.getDefiningOp<CallOp>();
  return call && roles.contains(call);
}

bool LossSection::isFlat(Value value) const {
  RankedTensorType type = getType(value);
  return type.getRank() >= 1 && type.getRank() <= 2 &&
         type.getDimSize(0) == rows;
}

bool LossSection::hasWideShape(Value value) const {
  RankedTensorType type = getType(value);
  return type.getRank() >= 2 && type.hasStaticShape() &&
         getLastSize(value) == width && type.getNumElements() == rows * width;
}

/// Whether a tensor from outside has one part for each row.
bool LossSection::hasRows(Value value) const {
  RankedTensorType type = getType(value);
  if (type.getRank() == 0 || !type.hasStaticShape())
    return false;
  return type.getRank() == 1
             ? type.getDimSize(0) == rows
             : type.getNumElements() == rows * getLastSize(value);
}

bool LossSection::isSliced(CallOp user, Value value) const {
  switch (getRole(user)) {
  case Role::RowProduct:
    return isWide(user.getResult(0)) &&
           value == user.getOperand(user.getNumOperands() - 2);
  case Role::ColumnProduct:
  case Role::Loss:
    return value == user.getOperand(1);
  case Role::LossBackward:
    return value == user.getOperand(2) ||
           (value == user.getOperand(0) && getType(value).getRank() == 1);
  case Role::RowByRow:
    return !isShared(value);
  default:
    return false;
  }
}

//===----------------------------------------------------------------------===//
// The calls
//===----------------------------------------------------------------------===//

Checked LossSection::add(Value value, bool transposed) {
  auto [found, isNew] = wide.try_emplace(value, transposed);
  if (isNew)
    worklist.push_back(value);
  else if (found->second != transposed)
    return Obstacle{value.getDefiningOp(), "mixes rows and columns"};
  return std::nullopt;
}

Checked LossSection::addCallsOf(Value value) {
  auto maker = value.getDefiningOp<CallOp>();
  if (!maker)
    return Obstacle{loss, "has logits that the step does not compute"};
  if (Checked obstacle = addCall(maker, value))
    return obstacle;
  for (Operation *user : value.getUsers()) {
    auto call = dyn_cast<CallOp>(user);
    if (!call || user->getBlock() != &block)
      return Obstacle{user, "needs the logits whole"};
    if (Checked obstacle = addCall(call, value))
      return obstacle;
  }
  return std::nullopt;
}

Checked LossSection::addCall(CallOp call, Value from) {
  if (roles.contains(call))
    return std::nullopt;
  if (call.getMutates() || call.getRandom())
    return Obstacle{call, "draws random numbers or writes in place"};
  std::optional<Role> role = findRole(call, from);
  if (!role)
    return Obstacle{call, "needs the logits whole"};
  roles[call] = *role;
  calls.push_back(call);
  switch (*role) {
  case Role::RowByRow:
  case Role::View:
    for (Value operand : call.getOperands())
      if (hasWideShape(operand))
        if (Checked obstacle = add(operand, false))
          return obstacle;
    return add(call.getResult(0), false);
  case Role::Transpose: {
    Value operand = call.getOperand(0);
    if (from != operand && !isWide(operand))
      if (Checked obstacle = add(operand, !isTransposed(from)))
        return obstacle;
    return add(call.getResult(0), !isTransposed(operand));
  }
  case Role::Loss:
    if (call != loss)
      return Obstacle{call, "is another loss of the same logits"};
    return std::nullopt;
  case Role::LossBackward:
    if (call.getOperand(1) != loss.getOperand(0))
      return Obstacle{call, "is the gradient of another loss"};
    return add(call.getResult(0), false);
  case Role::RowProduct:
  case Role::ColumnProduct:
  case Role::ColumnSum:
    return std::nullopt;
  }
  return std::nullopt;
}

/// The role of a call that makes or takes `from`; none if it has none.
std::optional<Role> LossSection::findRole(CallOp call, Value from) const {
  if (isCall(call, {"aten::nll_loss_forward"}))
    return Role::Loss;
  if (call.getNumResults() != 1 || call.getNumOperands() == 0)
    return std::nullopt;
  Value result = call.getResult(0);
  auto takeIf = [](bool holds, Role role) {
    return holds ? std::optional(role) : std::nullopt;
  };
  if (isCall(call, {"aten::t"}))
    return Role::Transpose;
  if (isCall(call, {"aten::mm", "aten::addmm"}))
    return findRoleOfProduct(call, from);
  if (isTransposed(from))
    return std::nullopt;
  if (isCall(call, {"aten::nll_loss_backward"}))
    return takeIf(isAbsent(call, 3), Role::LossBackward);
  if (isCall(call, {"aten::view", "aten::_unsafe_view", "aten::alias",
                    "aten::detach"}))
    return takeIf(hasWideShape(call.getOperand(0)) && hasWideShape(result),
                  Role::View);
  if (isCall(call, {"aten::_log_softmax"}))
    return takeIf(isLastDimension(call, 1), Role::RowByRow);
  if (isCall(call, {"aten::_log_softmax_backward_data"}))
    return takeIf(isLastDimension(call, 2), Role::RowByRow);
  if (isCall(call, {"aten::sum.dim_IntList"}))
    return takeIf(sumsRows(call), Role::ColumnSum);
  bool matches = llvm::all_of(call.getOperands(), [&](Value operand) {
    return hasWideShape(operand) || isShared(operand) || hasRows(operand);
  });
  return takeIf(isElementwise(call) && matches && hasWideShape(result) &&
                    isRowMajor(result),
                Role::RowByRow);
}

std::optional<Role> LossSection::findRoleOfProduct(CallOp call,
                                                   Value from) const {
  size_t numAdded = call.getNumOperands() - 2; // addmm's first operand
  Value left = call.getOperand(numAdded);
  Value right = call.getOperand(numAdded + 1);
  if (from == call.getResult(0)) {
    bool makes = !isTransposed(from) && !isWide(left) && hasRows(left) &&
                 (numAdded == 0 || isShared(call.getOperand(0)));
    return makes ? std::optional(Role::RowProduct) : std::nullopt;
  }
  if (numAdded != 0 || left == right)
    return std::nullopt;
  if (from == left && !isTransposed(from))
    return Role::RowProduct;
  // The sum over the rows of left's columns times right's rows.
  bool sums = from == left ? hasRows(right) : !isTransposed(from);
  return sums ? std::optional(Role::ColumnProduct) : std::nullopt;
}

//===----------------------------------------------------------------------===//
// What the section needs from outside
//===----------------------------------------------------------------------===//

Operation *LossSection::findAnchor() const {
  Operation *first = getBackward(program);
  for (Operation *user : CallOp(loss)->getUsers())
    if (user->isBeforeInBlock(first))
      first = user;
  return first;
}

/// Whether a product takes a value of the section where its role does not: only
/// if there are as many rows as classes, shapes alone do not tell.
bool LossSection::multipliesWrongly(CallOp product, Value value) const {
  bool isLeft = value != product.getOperands().back();
  switch (getRole(product)) {
  case Role::RowProduct:
    return !isLeft || isTransposed(value);
  case Role::ColumnProduct:
    return isWide(value) && isTransposed(value) != isLeft;
  default:
    return false;
  }
}

Checked LossSection::checkOperand(CallOp user, Value value) {
  if (isMade(value)) {
    if (multipliesWrongly(user, value))
      return Obstacle{user, "multiplies the logits by themselves"};
    return isWide(value) || value == CallOp(loss).getResult(1)
               ? Checked()
               : Obstacle{user, "needs all rows before"};
  }
  if (storages.isWrittenFrom(storages.getOwner(value), calls.front()))
    return Obstacle{user, "reads what is written later"};
  if (isSliced(user, value) && !isFlat(value) && !isRowMajor(value))
    return Obstacle{user, "reads rows that are not row-major"};
  return hoist(user, value);
}

/// Checks that what makes `value` can be computed before the section, and notes
/// what has to move there.
Checked LossSection::hoist(CallOp user, Value value) {
  if (isMade(value))
    return Obstacle{user, "needs what is computed from the loss"};
  Operation *op = value.getDefiningOp();
  if (!op || op->isBeforeInBlock(anchor) || hoisted.contains(op) || op == seed)
    return std::nullopt;
  auto call = dyn_cast<CallOp>(op);
  if (!call || call.getMutates() || call.getRandom())
    return Obstacle{user, "needs what cannot be computed earlier"};
  for (Value operand : call.getOperands()) {
    if (storages.isWrittenFrom(storages.getOwner(operand), anchor))
      return Obstacle{user, "reads what is written later"};
    if (Checked obstacle = hoist(user, operand))
      return obstacle;
  }
  hoisted.insert(op); // after what it needs
  return std::nullopt;
}
