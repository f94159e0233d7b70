//===- Operators.h - the operators that a plan may call -------------------===//
//
// A plan may come from anywhere, so running it must do nothing but compute. Its
// calls are therefore limited to operators that compute with tensors and cannot
// reach a file, the network or a process. That follows from an operator's
// schema:
//
//   - its namespace is aten: others have collectives, streams and callbacks. Of
//   those it may be an operator that whoever runs the plan has allowed, which
//   Python does for the collectives of a step that it has captured itself;
//   - every argument and result is a tensor, a number, a boolean, a device
//   (that
//     of the rank), a string, or a list or optional of them: an object of
//     another kind stands for something outside the program;
//   - it reads a tensor or returns one: else all that it does is outside;
//   - if it takes a string, it reads a tensor, and the string is an option of
//     that computation or the text of its assertion. An operator that makes
//     something of a string alone looks up what the string names.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_OPERATORS_OPERATORS_H
#define FSDP_RUNTIME_OPERATORS_OPERATORS_H

#include "fsdp/Plan/Plan.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <string_view>
#include <vector>

namespace fsdp::runtime {

/// Whether LibTorch is of this version; "2.11" is every 2.11.
bool isThisTorch(std::string_view version);

/// Why a plan may not call an operator of this schema; empty if it may.
std::string reasonToRefuse(const c10::FunctionSchema &schema);

/// Lets plans call these operators too, "mine::f" or "mine::f.overload", from
/// now on in this process. Their kernels are code that it trusts.
void allowOperators(const std::vector<std::string> &names);

/// The operator of a call. Throws InputError if this LibTorch has no operator
/// of that name, or no kernel for it, if plans may not call it, if its schema
/// is not the one that the call was captured with, or if it writes an operand
/// that the call does not say it mutates.
c10::OperatorHandle findOperator(const plan::Call &call);

/// Finds the operators of all calls of a plan, before any of them runs. Throws
/// InputError that names `path`, the instruction and the operator.
void checkOperators(const plan::Plan &plan, const std::string &path);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_OPERATORS_H
