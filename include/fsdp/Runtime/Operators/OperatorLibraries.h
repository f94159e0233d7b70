//===- OperatorLibraries.h - operators of other libraries -------*- C++ -*-===//
#ifndef FSDP_RUNTIME_OPERATORS_OPERATORLIBRARIES_H
#define FSDP_RUNTIME_OPERATORS_OPERATORLIBRARIES_H

#include <string>
#include <vector>

namespace fsdp::runtime {

/// Loads each library for the rest of the process, which runs its code, and
/// lets plans call the operators that it registers (TORCH_LIBRARY). A file that
/// was loaded before is not loaded again. Throws InputError, which names the
/// path of a library that cannot be loaded or registers no operator.
void loadOperators(const std::vector<std::string> &paths);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_OPERATORS_OPERATORLIBRARIES_H
