//===- LossSection.h - what is computed row by row around a loss -*- C++ -*-==//
#ifndef FSDP_TRANSFORMS_SHARD_LOSSSECTION_H
#define FSDP_TRANSFORMS_SHARD_LOSSSECTION_H

#include "fsdp/Dialect/Storages.h"
#include "fsdp/Transforms/StepProgram.h"

#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/SetVector.h"

namespace mlir::fsdp {

/// The calls between the products that make a cross-entropy's logits and, in
/// backward, the products and sums that take the logits' gradient. The logits
/// are a matrix of as many rows as there are targets; its rows, in one
/// dimension or several, are what the tensors of the section have in common.
class LossSection {
public:
  /// What a call of the section does with the rows.
  enum class Role {
    RowByRow,      ///< rows of the logits' size, from such and shared tensors
    View,          ///< the same rows in another shape
    Transpose,     ///< the same, or back
    Loss,          ///< nll_loss_forward
    LossBackward,  ///< nll_loss_backward
    RowProduct,    ///< a product with a row of its result for each row
    ColumnProduct, ///< a product that sums over the rows
    ColumnSum,     ///< a sum over the rows
  };
  /// Why the section cannot be computed for some of the rows.
  struct Obstacle {
    Operation *op;
    std::string reason; ///< a predicate, of which `op` is the subject
  };
  using Checked = std::optional<Obstacle>;

  /// Of an `nll_loss_forward` of a matrix.
  LossSection(ProgramOp program, aten::CallOp loss);

  /// Finds the section. Must be called first, and have found no obstacle.
  Checked analyze();

  int64_t getNumRows() const { return rows; }
  int64_t getWidth() const { return width; }
  /// Bytes of the tensors of the logits' size that the section allocates.
  int64_t getNumBytes() const;

  aten::CallOp getLoss() const { return loss; }
  /// The 1 with which backward begins.
  aten::CallOp getSeed() const { return seed; }
  /// In the order of the program.
  ArrayRef<aten::CallOp> getCalls() const { return calls; }
  Role getRole(aten::CallOp call) const { return roles.lookup(call); }
  /// What comes before this op does not need the loss, nor belongs to backward.
  Operation *getAnchor() const { return anchor; }
  /// What the section reads and is computed after the anchor, in an order in
  /// which it can be moved there.
  ArrayRef<Operation *> getHoisted() const { return hoisted.getArrayRef(); }

  /// Whether a call of the section makes the value.
  bool isMade(Value value) const;
  /// Whether the value is of the logits' size.
  bool isWide(Value value) const { return wide.contains(value); }
  bool isTransposed(Value value) const { return wide.lookup(value); }
  /// Whether the value has all its rows in the first dimension.
  bool isFlat(Value value) const;
  /// Whether a call computes its rows from the same rows alone of a tensor that
  /// is made outside.
  bool isSliced(aten::CallOp user, Value value) const;

private:
  Checked add(Value value, bool transposed);
  Checked addCallsOf(Value value);
  Checked addCall(aten::CallOp call, Value from);
  std::optional<Role> findRole(aten::CallOp call, Value from) const;
  std::optional<Role> findRoleOfProduct(aten::CallOp call, Value from) const;
  bool hasWideShape(Value value) const;
  bool hasRows(Value value) const;
  Operation *findAnchor() const;
  bool multipliesWrongly(aten::CallOp product, Value value) const;
  Checked checkOperand(aten::CallOp user, Value value);
  Checked hoist(aten::CallOp user, Value value);

  ProgramOp program;
  Block &block;
  Storages storages;
  aten::CallOp loss;
  int64_t rows;
  int64_t width; ///< elements of a row: the classes

  /// The values of the logits' size, and whether they are transposed.
  llvm::MapVector<Value, bool> wide;
  SmallVector<Value> worklist;
  llvm::DenseMap<aten::CallOp, Role> roles;
  SmallVector<aten::CallOp> calls;
  aten::CallOp seed;
  Operation *anchor = nullptr;
  llvm::SetVector<Operation *> hoisted;
};

} // namespace mlir::fsdp

#endif // FSDP_TRANSFORMS_SHARD_LOSSSECTION_H
