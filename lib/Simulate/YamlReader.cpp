//===- YamlReader.cpp - YAML mappings with positions in errors ------------===//
#include "YamlReader.h"

#include "fsdp/Plan/Limits.h"
#include "fsdp/Support/Nearest.h"
#include "fsdp/Support/YamlNodes.h"
#include "fsdp/Support/YamlText.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/SmallString.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/Support/SourceMgr.h"

using namespace llvm;

namespace fsdp::simulate {

void YamlReader::error(const YamlNode &node, const std::string &what) const {
  throw SimulateError(path + ":" + std::to_string(node.line) + ":" +
                      std::to_string(node.column) + ": " + what);
}

static std::string describe(const YamlNode &node) {
  switch (node.kind) {
  case YamlNode::Kind::Null:
    return "nothing";
  case YamlNode::Kind::Scalar:
    return "\"" + node.scalar + "\"";
  case YamlNode::Kind::Mapping:
    return "a mapping";
  }
  llvm_unreachable("all kinds are listed");
}

namespace {
/// Builds nodes from LLVM's parser, which reports syntax errors to a handler.
class Parser {
public:
  Parser(const YamlReader &reader, StringRef text)
      : reader(reader), stream(text, sources, /*ShowColors=*/false) {
    sources.setDiagHandler(
        [](const SMDiagnostic &diag, void *self) {
          auto &parser = *static_cast<Parser *>(self);
          if (!parser.message.empty())
            return;
          parser.message = diag.getMessage().str();
          parser.where.line = std::max(diag.getLineNo(), 1);
          parser.where.column = std::max(diag.getColumnNo() + 1, 1);
        },
        this);
  }

  YamlNode run() {
    YamlNode root;
    auto document = stream.begin();
    yaml::Node *node = document->getRoot();
    if (node)
      root = convert(node);
    std::optional<SMLoc> next = findNextDocument(stream, document);
    check();
    if (!node)
      reader.error(where, "expected YAML");
    if (next) {
      std::tie(where.line, where.column) = sources.getLineAndColumn(*next);
      reader.error(where, kOneDocument);
    }
    return root;
  }

private:
  void check() const {
    if (!message.empty())
      reader.error(where, message);
    if (const_cast<yaml::Stream &>(stream).failed())
      reader.error(where, "not a YAML file");
  }

  YamlNode convert(yaml::Node *node, unsigned depth = 0) {
    check();
    YamlNode result;
    std::tie(result.line, result.column) =
        sources.getLineAndColumn(startOf(*node));
    if (!anchorOf(*node).empty())
      reader.error(result, kNoAnchors);
    if (isa<yaml::NullNode>(node))
      return result;
    if (auto *scalar = dyn_cast<yaml::ScalarNode>(node)) {
      SmallString<32> storage;
      result.kind = YamlNode::Kind::Scalar;
      result.scalar = scalar->getValue(storage).str();
      return result;
    }
    if (depth == kMaxYamlDepth)
      reader.error(result,
                   "nested deeper than " + std::to_string(kMaxYamlDepth));
    auto *mapping = dyn_cast<yaml::MappingNode>(node);
    if (!mapping)
      reader.error(result, "expected a scalar or a mapping");
    result.kind = YamlNode::Kind::Mapping;
    for (yaml::KeyValueNode &entry : *mapping) {
      yaml::Node *key = entry.getKey();
      if (!key)
        break;
      YamlNode name = convert(key, depth + 1);
      yaml::Node *value = entry.getValue();
      if (!value)
        break;
      result.entries.push_back({std::move(name), convert(value, depth + 1)});
    }
    check();
    return result;
  }

  const YamlReader &reader;
  SourceMgr sources;
  yaml::Stream stream;
  std::string message;
  YamlNode where;
};
} // namespace

YamlNode YamlReader::parse(StringRef text) const {
  if (std::optional<TextDefect> defect = findDefect(text)) {
    YamlNode where;
    where.line = defect->line;
    where.column = defect->column;
    error(where, defect->what);
  }
  return Parser(*this, text).run();
}

void YamlReader::forEachEntry(const YamlNode &node, const std::string &where,
                              ArrayRef<StringRef> known,
                              ArrayRef<StringRef> required,
                              const Visit &visit) const {
  if (node.kind != YamlNode::Kind::Mapping)
    error(node, "expected a mapping for " + where + ", got " + describe(node));
  StringSet<> seen;
  for (const auto &[key, value] : node.entries) {
    if (!is_contained(known, key.scalar))
      error(key, "unknown key \"" + key.scalar + "\" in " + where +
                     nearest(key.scalar, known));
    if (!seen.insert(key.scalar).second)
      error(key, "key \"" + key.scalar + "\" is given twice");
  }
  for (StringRef key : required)
    if (!seen.contains(key))
      error(node, "missing key \"" + key.str() + "\" in " + where);
  for (const auto &[key, value] : node.entries)
    visit(key.scalar, value);
}

double YamlReader::number(StringRef key, const YamlNode &node,
                          Range range) const {
  struct Bounds {
    double low, high;
    const char *text;
  };
  constexpr Bounds all[] = {{0, 1e6, "from 0 to 1e6"},
                            {1, 1e30, "from 1 to 1e30"},
                            {1, 1e18, "from 1 to 1e18"},
                            {1e-6, 1, "from 1e-6 to 1"},
                            {1, 1e6, "from 1 to 1e6"}};
  const Bounds &bounds = all[size_t(range)];
  double value;
  if (node.kind != YamlNode::Kind::Scalar ||
      StringRef(node.scalar).getAsDouble(value) ||
      !(value >= bounds.low && value <= bounds.high))
    error(node, std::string("expected a number ") + bounds.text + " for \"" +
                    key.str() + "\", got " + describe(node));
  return value;
}

int64_t YamlReader::count(StringRef key, const YamlNode &node) const {
  // As many ranks as a job can have.
  constexpr int64_t most = plan::kMaxWorldSize * plan::kMaxWorldSize;
  int64_t value;
  if (node.kind != YamlNode::Kind::Scalar ||
      StringRef(node.scalar).getAsInteger(10, value) || value < 1 ||
      value > most)
    error(node, "expected an integer from 1 to " + std::to_string(most) +
                    " for \"" + key.str() + "\", got " + describe(node));
  return value;
}

bool YamlReader::boolean(StringRef key, const YamlNode &node) const {
  if (node.kind != YamlNode::Kind::Scalar ||
      (node.scalar != "true" && node.scalar != "false"))
    error(node, "expected true or false for \"" + key.str() + "\", got " +
                    describe(node));
  return node.scalar == "true";
}

std::string YamlReader::string(StringRef key, const YamlNode &node) const {
  if (node.kind != YamlNode::Kind::Scalar || node.scalar.empty())
    error(node,
          "expected a name for \"" + key.str() + "\", got " + describe(node));
  return node.scalar;
}

} // namespace fsdp::simulate
