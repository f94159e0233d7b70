//===- Arguments.h - plan arguments as ATen's calling convention ----------===//
#ifndef FSDP_RUNTIME_OPERATORS_ARGUMENTS_H
#define FSDP_RUNTIME_OPERATORS_ARGUMENTS_H

#include "fsdp/Plan/Plan.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <vector>

namespace fsdp::runtime {

/// One argument of a call, converted to its schema type as far as it does not
/// depend on the step.
class ArgTemplate {
public:
  /// `device` is that of a plan::DeviceArg. Throws InputError that says what
  /// the schema expects.
  ArgTemplate(const plan::Arg &arg, const c10::Argument &formal,
              c10::Device device = c10::kCPU);

  /// The argument's value in this step. `values` is indexed by value id.
  c10::IValue instantiate(const std::vector<at::Tensor> &values) const;

private:
  enum class Kind : uint8_t {
    Constant,
    Tensor,
    TensorList,        ///< Tensor[]
    OptionalTensorList ///< Tensor?[]
  };

  Kind kind = Kind::Constant;
  c10::IValue constant;
  /// For the tensor kinds; -1 is an absent element.
  std::vector<plan::ValueId> ids;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_ARGUMENTS_H
