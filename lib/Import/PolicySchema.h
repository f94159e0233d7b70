//===- PolicySchema.h - what the policy file may say ----------------------===//
#ifndef FSDP_IMPORT_POLICYSCHEMA_H
#define FSDP_IMPORT_POLICYSCHEMA_H

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/StringRef.h"

#include <optional>
#include <string>
#include <vector>

namespace mlir::fsdp {

/// One key of the policy, as python/fsdp_mlir/support/policy_schema.json
/// defines it.
///
/// A value is one of `values`, or of one of `types`: `bool`, `false`, `null`;
/// `integer` and `number`, which are finite and in the bounds; `bytes`, a
/// positive number of them with or without a unit; `pattern`, `operator`,
/// `path`, `name`, which are not empty; `mapping` of `keys`; `mapping of TYPE`,
/// whose keys are any; `list of TYPE`. A list of patterns is not empty.
struct PolicyKey {
  std::string name; ///< empty for the policy itself
  std::vector<std::string> types, values;
  std::optional<double> least, above, most, below;
  std::optional<size_t> length;       ///< of a list
  std::optional<std::string> initial; ///< the default, of one scalar
  bool required = false;
  std::string needs;     ///< the key beside it that must be there too
  std::string standsFor; ///< the key whose value a scalar is
  std::vector<std::string> oneOf;
  std::vector<PolicyKey> keys;
  /// One value of `list of TYPE` or `mapping of TYPE`; at most one.
  std::vector<PolicyKey> element;

  const PolicyKey *find(llvm::StringRef key) const;
  /// Whether the text of a scalar is a value.
  bool accepts(llvm::StringRef text) const;
  /// What is expected, as "an integer of at least 1 or auto".
  std::string describe() const;
};

/// The schema of a whole policy file.
const PolicyKey &getPolicySchema();

/// The texts of a scalar as values; none for other texts.
std::optional<int64_t> toInteger(llvm::StringRef text);
std::optional<double> toNumber(llvm::StringRef text);
std::optional<int64_t> toBytes(llvm::StringRef text);

} // namespace mlir::fsdp

#endif // FSDP_IMPORT_POLICYSCHEMA_H
