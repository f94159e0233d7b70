//===- Manifest.cpp - what a native checkpoint consists of ----------------===//
#include "fsdp/Runtime/Checkpoint/Manifest.h"
#include "fsdp/Plan/ParseJson.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <charconv>
#include <set>

namespace fsdp::runtime {

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

constexpr std::string_view kFormat = "fsdp-mlir checkpoint";
/// Before the hash, and after it.
constexpr std::string_view kBeforeHash = "{\"hash\": \"";
constexpr std::string_view kAfterHash = "\",\n";
constexpr size_t kHashDigits = 5 + 32;

json printFile(const Manifest::File &file) {
  json chunks = json::array();
  for (const Manifest::FileChunk &chunk : file.chunks)
    chunks.push_back({chunk.tensor, chunk.chunk.offsets, chunk.chunk.sizes,
                      chunk.begin, chunk.bytes, chunk.hash});
  return {{"name", file.name},
          {"bytes", file.bytes},
          {"hash", file.hash},
          {"chunks", std::move(chunks)}};
}

/// Takes values out of the tree; what is not as expected is an InputError.
class Reader {
public:
  Reader(const std::string &path) : path(path) {}

  [[noreturn]] void fail(const std::string &message) const {
    throw InputError(path + ": " + message);
  }
  const json &member(const json &object, const char *key) const {
    if (!object.is_object() || !object.contains(key))
      fail(std::string("no \"") + key + "\"");
    return object.at(key);
  }
  /// Whole, from 0.
  int64_t number(const json &value, const char *key) const {
    if (!value.is_number_integer() || value.get<int64_t>() < 0)
      fail(std::string("\"") + key +
           "\": expected a whole number from 0, got " + text(value));
    return value.get<int64_t>();
  }
  int64_t numberOf(const json &object, const char *key) const {
    return number(member(object, key), key);
  }
  std::string string(const json &value, const char *key) const {
    if (!value.is_string())
      fail(std::string("\"") + key + "\": expected a text, got " + text(value));
    return value.get<std::string>();
  }
  std::string stringOf(const json &object, const char *key) const {
    return string(member(object, key), key);
  }
  const json &list(const json &value, const char *key) const {
    if (!value.is_array())
      fail(std::string("\"") + key + "\": expected a list, got " + text(value));
    return value;
  }
  const json &object(const json &value, const char *key) const {
    if (!value.is_object())
      fail(std::string("\"") + key + "\": expected an object, got " +
           text(value));
    return value;
  }
  std::vector<int64_t> numbers(const json &value, const char *key) const {
    std::vector<int64_t> result;
    for (const json &item : list(value, key))
      result.push_back(number(item, key));
    return result;
  }

private:
  /// Bounded.
  static std::string text(const json &value) {
    std::string whole =
        value.dump(-1, ' ', false, json::error_handler_t::replace);
    return whole.size() <= 80 ? whole : whole.substr(0, 77) + "...";
  }

  const std::string &path;
};

RunState readState(const Reader &read, const json &tree) {
  RunState state;
  state.step = read.numberOf(tree, "step");
  state.samples = read.numberOf(tree, "samples");
  state.updates = read.numberOf(tree, "updates");
  std::string seed = read.stringOf(tree, "seed");
  auto [end, error] =
      std::from_chars(seed.data(), seed.data() + seed.size(), state.seed);
  if (error != std::errc() || end != seed.data() + seed.size())
    read.fail("\"seed\": expected a whole number from 0 in quotes");
  state.data = read.stringOf(tree, "data");
  state.plan = read.stringOf(tree, "plan");
  if (tree.contains("run"))
    state.run = read.stringOf(tree, "run");
  state.worldSize = read.numberOf(tree, "world_size");
  if (const json &scaler = read.member(tree, "loss_scaler");
      !scaler.is_null()) {
    const json &scale = read.member(scaler, "scale");
    if (!scale.is_number())
      read.fail("\"scale\": expected a number");
    state.scaler = {scale.get<double>(),
                    read.numberOf(scaler, "growth_tracker")};
  }
  const json &environment = read.member(tree, "environment");
  for (const auto &[key, value] :
       read.object(environment, "environment").items())
    state.environment[key] = read.string(value, "environment");
  return state;
}

bool isFileName(const std::string &name) {
  return name.size() <= 255 && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos && !name.starts_with('.') &&
         name.ends_with(".safetensors");
}

Manifest::File readManifestFile(const Reader &read, const json &tree) {
  Manifest::File file;
  file.name = read.stringOf(tree, "name");
  if (!isFileName(file.name))
    read.fail("expected a safetensors file in its folder, got \"" +
              file.name.substr(0, 80) + "\"");
  file.bytes = uint64_t(read.numberOf(tree, "bytes"));
  file.hash = read.stringOf(tree, "hash");
  uint64_t end = 0;
  std::set<std::string> names;
  for (const json &row : read.list(read.member(tree, "chunks"), "chunks")) {
    if (read.list(row, "chunks").size() != 6)
      read.fail("\"chunks\": expected rows of 6");
    Manifest::FileChunk chunk;
    chunk.tensor = read.string(row[0], "chunks");
    chunk.chunk = {read.numbers(row[1], "chunks"),
                   read.numbers(row[2], "chunks")};
    chunk.begin = uint64_t(read.number(row[3], "chunks"));
    chunk.bytes = uint64_t(read.number(row[4], "chunks"));
    chunk.hash = read.string(row[5], "chunks");
    auto place = [&] { return file.name + ": \"" + chunk.tensor + "\""; };
    if (!names.insert(chunk.tensor).second)
      read.fail(place() + " appears twice");
    // The first begins behind the header.
    if (names.size() > 1 && chunk.begin != end)
      read.fail(place() + ": expected it at byte " + std::to_string(end) +
                ", got " + std::to_string(chunk.begin));
    if (chunk.begin > file.bytes || chunk.bytes > file.bytes - chunk.begin)
      read.fail(place() + " ends beyond the end of the file");
    end = chunk.begin + chunk.bytes;
    file.chunks.push_back(std::move(chunk));
  }
  if (!file.chunks.empty() && end != file.bytes)
    read.fail(file.name + ": expected chunks up to byte " +
              std::to_string(file.bytes) + ", got " + std::to_string(end));
  return file;
}

Manifest readManifest(const Reader &read, const json &tree) {
  Manifest manifest;
  if (std::string format = read.stringOf(tree, "format"); format != kFormat)
    read.fail("expected the format \"" + std::string(kFormat) + "\", got \"" +
              format.substr(0, 80) + "\"");
  if (int64_t version = read.numberOf(tree, "version");
      version != kManifestVersion)
    read.fail("expected version " + std::to_string(kManifestVersion) +
              " of the format, got " + std::to_string(version));
  manifest.attempt = read.stringOf(tree, "attempt");
  manifest.state = readState(read, tree);
  const json &tensors = read.member(tree, "tensors");
  for (const auto &[name, spec] : read.object(tensors, "tensors").items()) {
    plan::TensorSpec &to = manifest.tensors[name];
    std::string dtype = read.stringOf(spec, "dtype");
    std::optional<plan::DType> known = plan::parseDType(dtype);
    if (!known)
      read.fail("tensor \"" + name + "\": unknown dtype \"" +
                dtype.substr(0, 80) + "\"");
    to.dtype = *known;
    to.shape = read.numbers(read.member(spec, "shape"), "shape");
  }
  const json &aliases = read.member(tree, "aliases");
  for (const auto &[alias, name] : read.object(aliases, "aliases").items())
    manifest.aliases[alias] = read.string(name, "aliases");
  manifest.values = read.object(read.member(tree, "values"), "values");
  std::set<std::string> names;
  for (const json &file : read.list(read.member(tree, "files"), "files")) {
    manifest.files.push_back(readManifestFile(read, file));
    if (!names.insert(manifest.files.back().name).second)
      read.fail("file \"" + manifest.files.back().name + "\" appears twice");
  }
  return manifest;
}

} // namespace

std::string printManifest(const Manifest &manifest) {
  const RunState &state = manifest.state;
  json scaler;
  if (state.scaler)
    scaler = {{"scale", state.scaler->scale},
              {"growth_tracker", state.scaler->growthTracker}};
  json tensors = json::object();
  for (const auto &[name, spec] : manifest.tensors)
    tensors[name] = {{"dtype", plan::dtypeName(spec.dtype)},
                     {"shape", spec.shape}};
  json files = json::array();
  for (const Manifest::File &file : manifest.files)
    files.push_back(printFile(file));
  ordered_json tree = {{"format", kFormat},
                       {"version", kManifestVersion},
                       {"attempt", manifest.attempt},
                       {"run", state.run},
                       {"step", state.step},
                       {"samples", state.samples},
                       {"updates", state.updates},
                       {"seed", std::to_string(state.seed)},
                       {"data", state.data},
                       {"plan", state.plan},
                       {"world_size", state.worldSize},
                       {"loss_scaler", scaler},
                       {"environment", state.environment},
                       {"aliases", manifest.aliases},
                       {"values", manifest.values},
                       {"tensors", tensors},
                       {"files", files}};
  // Its first brace is before the hash.
  std::string rest = tree.dump().substr(1) + "\n";
  return std::string(kBeforeHash) + hashBytes(rest) + std::string(kAfterHash) +
         rest;
}

Manifest parseManifest(std::string_view text, const std::string &path) {
  Reader read(path);
  size_t begin = kBeforeHash.size() + kHashDigits + kAfterHash.size();
  if (text.size() < begin || !text.starts_with(kBeforeHash) ||
      text.substr(kBeforeHash.size() + kHashDigits, kAfterHash.size()) !=
          kAfterHash)
    read.fail("expected a manifest, which begins with its hash");
  std::string_view said = text.substr(kBeforeHash.size(), kHashDigits);
  if (std::string got = hashBytes(text.substr(begin)); got != said)
    read.fail("damaged: expected the hash at its beginning, got " + got);
  try {
    return readManifest(read, plan::parseJson(text, path));
  } catch (const plan::PlanError &error) {
    throw InputError(error.what());
  } catch (const json::exception &error) {
    read.fail(std::string("not a manifest: ") + error.what());
  }
}

} // namespace fsdp::runtime
