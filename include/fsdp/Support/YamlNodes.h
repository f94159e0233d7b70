//===- YamlNodes.h - what LLVM's YAML parser leaves to its users ----------===//
#ifndef FSDP_SUPPORT_YAMLNODES_H
#define FSDP_SUPPORT_YAMLNODES_H

#include "llvm/Support/YAMLParser.h"

#include <optional>

namespace fsdp {

/// The name of a node's anchor, or that an alias refers to; else empty. It is
/// part of the text.
inline llvm::StringRef anchorOf(const llvm::yaml::Node &node) {
  if (const auto *alias = llvm::dyn_cast<llvm::yaml::AliasNode>(&node))
    return alias->getName();
  return node.getAnchor();
}

/// Where a node begins. The source range of an alias is what stands after it,
/// and that of a node with an anchor leaves the anchor out.
inline llvm::SMLoc startOf(const llvm::yaml::Node &node) {
  llvm::StringRef anchor = anchorOf(node);
  return anchor.empty() ? node.getSourceRange().Start
                        : llvm::SMLoc::getFromPointer(anchor.data() - 1);
}

/// Where a further document of the stream begins, once all nodes of `document`
/// have been visited; they are gone then. What stands behind a root that has
/// ended is a document too.
inline std::optional<llvm::SMLoc>
findNextDocument(llvm::yaml::Stream &stream,
                 llvm::yaml::document_iterator &document) {
  if (stream.failed() || ++document == stream.end())
    return std::nullopt;
  const llvm::yaml::Node *root = document->getRoot();
  return root && !stream.failed() ? std::optional(startOf(*root))
                                  : std::nullopt;
}

inline constexpr const char *kOneDocument =
    "expected one YAML document, got more behind its end";
inline constexpr const char *kNoAnchors =
    "expected a value without anchor and alias";

} // namespace fsdp

#endif // FSDP_SUPPORT_YAMLNODES_H
