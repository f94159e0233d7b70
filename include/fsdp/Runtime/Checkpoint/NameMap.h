//===- NameMap.h - names of tensors under other rules ---------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_NAMEMAP_H
#define FSDP_RUNTIME_CHECKPOINT_NAMEMAP_H

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::runtime {

/// A JSON object from our names to theirs, such as
///
///   {"layers.{}.attention.wq.weight":
///      "model.layers.{}.self_attn.q_proj.weight"}
///
/// `{}` stands for a number in decimal digits; both names have the same numbers
/// in the same order. A pattern without `{}` takes precedence over one with it.
/// Tied tensors have several of our names for one of theirs.
class NameMap {
public:
  /// Reads the file. Throws InputError that names it.
  explicit NameMap(std::string path);

  /// Their name for ours. Throws InputError if there is none, or if several
  /// patterns give different names.
  std::string theirs(std::string_view ours) const;
  /// Our names for theirs; throws InputError if there is none.
  std::vector<std::string> ours(std::string_view theirs) const;

private:
  struct Rule {
    std::string ours, theirs;
  };

  std::vector<std::string> translate(std::string_view name,
                                     std::string Rule::*from,
                                     std::string Rule::*to) const;

  std::string path;
  std::vector<Rule> rules;
};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_NAMEMAP_H
