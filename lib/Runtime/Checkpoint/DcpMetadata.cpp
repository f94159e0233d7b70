//===- DcpMetadata.cpp - the file .metadata of a DCP checkpoint -----------===//
#include "fsdp/Runtime/Checkpoint/DcpMetadata.h"
#include "fsdp/Runtime/Checkpoint/Pickle.h"
#include "fsdp/Runtime/Checkpoint/PickleWriter.h"
#include "fsdp/Runtime/Checkpoint/TorchItems.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Support/Hash.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

namespace fsdp::runtime {

using Object = Pickle::Object;
using plan::DType;

namespace {

#define FSDP_DCP "torch.distributed.checkpoint.metadata "
constexpr std::string_view kMetadata = FSDP_DCP "Metadata",
                           kTensor = FSDP_DCP "TensorStorageMetadata",
                           kBytes = FSDP_DCP "BytesStorageMetadata",
                           kProperties = FSDP_DCP "TensorProperties",
                           kChunk = FSDP_DCP "ChunkStorageMetadata",
                           kIndex = FSDP_DCP "MetadataIndex",
                           kStorageMeta = FSDP_DCP "StorageMeta",
                           kMemoryFormat = FSDP_DCP "_MEM_FORMAT_ENCODING";
#undef FSDP_DCP
constexpr std::string_view
    kStorageInfo = "torch.distributed.checkpoint.filesystem _StorageInfo",
    kLayout = "torch.serialization _get_layout", kSize = "torch Size",
    kPath = "pathlib PosixPath", kLocalPath = "pathlib._local PosixPath";
constexpr std::string_view kVersion = "1.0.0", kStrided = "torch.strided";

/// A member of the pickle if a hash of the pickle follows it; PyTorch does not
/// know this member.
constexpr std::string_view kHashFollows = "fsdp_mlir_hash_follows";

const std::vector<std::string_view> &metadataGlobals() {
  static const std::vector<std::string> dtypes = [] {
    std::vector<std::string> names;
    for (int i = 0; i <= int(DType::Complex128); ++i)
      names.push_back(torchName(DType(i)));
    return names;
  }();
  static const std::vector<std::string_view> globals = [] {
    std::vector<std::string_view> names = {
        kMetadata, kTensor,      kBytes,        kProperties,  kChunk,
        kIndex,    kStorageMeta, kMemoryFormat, kStorageInfo, kLayout,
        kSize,     kPath,        kLocalPath};
    names.insert(names.end(), dtypes.begin(), dtypes.end());
    return names;
  }();
  return globals;
}

/// "tensor "w"", for messages.
std::string called(std::string_view name) {
  return "\"" + std::string(name) + "\"";
}

class Reader {
public:
  explicit Reader(const Pickle &pickle) : pickle(pickle) {}

  DcpMetadata read() {
    enum { Items, PlannerData, StorageData, StorageMeta, Version, HashFollows };
    constexpr std::array<std::string_view, 6> keys = {
        "state_dict_metadata", "planner_data", "storage_data",
        "storage_meta",        "version",      kHashFollows};
    auto members = pickle.members(
        pickle.state(pickle.root(), kMetadata, "metadata"), keys, "metadata");
    if (!members[Items] || !members[StorageData])
      pickle.fail("metadata", "expected state_dict_metadata and storage_data");
    if (members[Version] && !pickle.isNone(*members[Version]))
      if (std::string_view version = pickle.text(*members[Version], "version");
          version != kVersion)
        pickle.fail("version", "expected " + std::string(kVersion) + ", got " +
                                   std::string(version));
    if (members[HashFollows])
      hashFollows = pickle.boolean(*members[HashFollows], kHashFollows);
    if (members[StorageMeta] && !pickle.isNone(*members[StorageMeta]))
      checkStorageMeta(*members[StorageMeta]);
    readItems(*members[Items]);
    readPlaces(*members[StorageData]);
    if (members[PlannerData] && !pickle.isNone(*members[PlannerData]))
      readPaths(*members[PlannerData]);
    return std::move(metadata);
  }

  bool hashFollows = false;

private:
  /// Who saved and where; only looked at.
  void checkStorageMeta(Object object) {
    constexpr std::array<std::string_view, 4> keys = {
        "checkpoint_id", "save_id", "load_id", "modules"};
    auto members =
        pickle.members(pickle.state(object, kStorageMeta, "storage_meta"), keys,
                       "storage_meta");
    for (size_t i = 0; i < 3; ++i) {
      if (!members[i] || pickle.isNone(*members[i]))
        continue;
      bool local = pickle.isCall(*members[i], kLocalPath);
      if (!local && !pickle.isCall(*members[i], kPath)) {
        pickle.text(*members[i], keys[i]);
        continue;
      }
      for (Object part :
           pickle.arguments(*members[i], local ? kLocalPath : kPath, keys[i]))
        pickle.text(part, keys[i]);
    }
    if (members[3])
      for (Object module : pickle.list(*members[3], keys[3]))
        pickle.text(module, keys[3]);
  }

  DType readProperties(Object object, const std::string &what) {
    // The sixth since PyTorch 2.15: strides of the whole tensor.
    auto parts = pickle.tuple(pickle.state(object, kProperties, what), what);
    if (parts.size() != 5 && parts.size() != 6)
      pickle.fail(what, "expected 5 or 6 properties, got " +
                            std::to_string(parts.size()));
    std::string_view name = pickle.global(parts[0], what);
    std::optional<DType> dtype = parseTorchName(name);
    if (!dtype)
      pickle.fail(what, "expected a dtype, got " + std::string(name));
    auto layout = pickle.arguments(parts[1], kLayout, what);
    if (layout.size() != 1 || pickle.text(layout[0], what) != kStrided)
      pickle.fail(what, "expected layout torch.strided");
    pickle.boolean(parts[2], what);
    auto format = pickle.arguments(parts[3], kMemoryFormat, what);
    // One that PyTorch knows; it does not say how elements lie in an item.
    if (format.size() != 1 || uint64_t(pickle.integer(format[0], what)) > 2)
      pickle.fail(what, "expected a memory format");
    pickle.boolean(parts[4], what);
    if (parts.size() == 6 && !pickle.isNone(parts[5]))
      pickle.extents(parts[5], what);
    return *dtype;
  }

  DcpMetadata::Tensor readTensor(Object object, const std::string &what) {
    constexpr std::array<std::string_view, 3> keys = {"properties", "size",
                                                      "chunks"};
    auto members =
        pickle.members(pickle.state(object, kTensor, what), keys, what);
    if (!members[0] || !members[1] || !members[2])
      pickle.fail(what, "expected properties, size and chunks");
    DcpMetadata::Tensor tensor;
    tensor.spec.dtype = readProperties(*members[0], what);
    tensor.spec.shape = pickle.extents(*members[1], what);
    for (Object chunk : pickle.list(*members[2], what)) {
      constexpr std::array<std::string_view, 2> keys = {"offsets", "sizes"};
      auto box = pickle.members(pickle.state(chunk, kChunk, what), keys, what);
      if (!box[0] || !box[1])
        pickle.fail(what, "expected chunks of offsets and sizes");
      tensor.chunks.push_back(
          {{pickle.extents(*box[0], what), pickle.extents(*box[1], what)}, {}});
    }
    return tensor;
  }

  void readItems(Object object) {
    for (auto [key, item] : pickle.dict(object, "state_dict_metadata")) {
      std::string name(pickle.text(key, "state_dict_metadata"));
      std::string what = called(name);
      bool isValue = pickle.isCall(item, kBytes);
      if (isValue)
        pickle.arguments(item, kBytes, what);
      bool added =
          isValue
              ? metadata.values.emplace(name, DcpPlace{}).second
              : metadata.tensors.emplace(name, readTensor(item, what)).second;
      if (!added ||
          (metadata.values.contains(name) && metadata.tensors.contains(name)))
        pickle.fail(what, "it appears twice");
    }
  }

  DcpPlace readPlace(Object object, const std::string &what) {
    constexpr std::array<std::string_view, 4> keys = {
        "relative_path", "offset", "length", "transform_descriptors"};
    auto members =
        pickle.members(pickle.state(object, kStorageInfo, what), keys, what);
    if (!members[0] || !members[1] || !members[2])
      pickle.fail(what, "expected relative_path, offset and length");
    if (members[3] && !pickle.isNone(*members[3]) &&
        !pickle.list(*members[3], what).empty())
      pickle.fail(what, "expected an item that is not compressed");
    DcpPlace place{std::string(pickle.text(*members[0], what)),
                   pickle.integer(*members[1], what),
                   pickle.integer(*members[2], what)};
    if (place.file.empty() || place.file[0] == '.' ||
        place.file.find('/') != std::string::npos ||
        place.file.find('\0') != std::string::npos)
      pickle.fail(what,
                  "expected a file in the folder, got " + called(place.file));
    int64_t end = 0;
    if (place.offset < 0 || place.length <= 0 ||
        __builtin_add_overflow(place.offset, place.length, &end))
      pickle.fail(what, "expected a part of " + place.file + ", got " +
                            std::to_string(place.length) + " bytes at " +
                            std::to_string(place.offset));
    return place;
  }

  void readPlaces(Object object) {
    // Chunks of one tensor at one offset are one item, unless they are empty.
    using Key = std::pair<std::string, std::vector<int64_t>>;
    std::map<Key, DcpPlace *> wanted;
    for (auto &[name, tensor] : metadata.tensors)
      for (DcpMetadata::SavedChunk &chunk : tensor.chunks)
        if (!wanted.emplace(Key{name, chunk.chunk.offsets}, &chunk.place)
                 .second)
          pickle.fail(called(name), "two chunks begin at one element");
    for (auto [index, info] : pickle.dict(object, "storage_data")) {
      constexpr std::array<std::string_view, 3> keys = {"fqn", "offset",
                                                        "index"};
      auto members = pickle.members(pickle.state(index, kIndex, "storage_data"),
                                    keys, "storage_data");
      if (!members[0])
        pickle.fail("storage_data", "expected an fqn");
      std::string name(pickle.text(*members[0], "storage_data"));
      std::string what = called(name);
      // A hint where PyTorch looks first for the chunk.
      if (members[2] && !pickle.isNone(*members[2]))
        pickle.integer(*members[2], what);
      DcpPlace *place = nullptr;
      if (!members[1] || pickle.isNone(*members[1])) {
        auto value = metadata.values.find(name);
        place = value == metadata.values.end() ? nullptr : &value->second;
      } else {
        auto chunk = wanted.find({name, pickle.extents(*members[1], what)});
        place = chunk == wanted.end() ? nullptr : chunk->second;
      }
      if (!place)
        pickle.fail(what,
                    "an item that is neither a chunk of a tensor nor a value");
      if (!place->file.empty())
        pickle.fail(what, "it has two items for one chunk");
      *place = readPlace(info, what);
    }
    for (const auto &[key, place] : wanted)
      if (place->file.empty())
        pickle.fail(called(key.first), "a chunk without an item");
    for (const auto &[name, place] : metadata.values)
      if (place.file.empty())
        pickle.fail(called(name), "a value without an item");
  }

  /// How the names came about: each of keys and indices.
  void readPaths(Object object) {
    for (auto [key, value] : pickle.dict(object, "planner_data")) {
      std::string name(pickle.text(key, "planner_data"));
      pickle.tuple(value, "planner_data");
      nlohmann::json path = pickle.value(value, "planner_data");
      std::string joined;
      for (const nlohmann::json &part : path) {
        if (!part.is_string() && !part.is_number_integer())
          pickle.fail("planner_data", "expected keys and indices of " +
                                          called(name) + ", got " +
                                          part.dump());
        joined += (&part == &path[0] ? "" : ".") +
                  (part.is_string() ? part.get<std::string>() : part.dump());
      }
      if (joined != name ||
          !(metadata.tensors.contains(name) || metadata.values.contains(name)))
        pickle.fail("planner_data", "expected the keys of an item, got " +
                                        called(joined) + " for " +
                                        called(name));
      metadata.paths[name] = std::move(path);
    }
  }

  const Pickle &pickle;
  DcpMetadata metadata;
};

} // namespace

DcpMetadata readDcpMetadata(const std::string &path,
                            std::span<const std::byte> bytes) {
  Pickle pickle(path, bytes, metadataGlobals());
  Reader reader(pickle);
  DcpMetadata metadata = reader.read();
  std::string_view text(reinterpret_cast<const char *>(bytes.data()),
                        bytes.size());
  std::string_view rest = text.substr(pickle.size());
  std::string expected;
  if (reader.hashFollows)
    expected = fsdp::hashBytes(text.substr(0, pickle.size()));
  if (rest != expected)
    throw InputError(path + ": damaged: " +
                     (expected.empty()
                          ? "bytes follow its pickle"
                          : "expected hash " + expected + ", got \"" +
                                std::string(rest.substr(0, 80)) + "\""));
  return metadata;
}

namespace {

/// torchtitan's, whose objects are saved as dicts: "optimizer.state.w.exp_avg"
/// lies in one that is named "optimizer".
constexpr std::array<std::string_view, 4> kDicts = {
    "optimizer.", "lr_scheduler.", "train_state.", "dataloader."};

class Writer {
public:
  std::string write(const DcpMetadata &metadata) && {
    out.object(kMetadata);
    out.dict();
    out.mark();
    out.string("state_dict_metadata");
    out.dict();
    out.mark();
    for (const auto &[name, tensor] : metadata.tensors) {
      out.string(name);
      writeTensor(tensor);
    }
    for (const auto &[name, place] : metadata.values) {
      out.string(name);
      out.object(kBytes);
    }
    out.endItems();
    out.string("planner_data");
    out.dict();
    out.mark();
    for (const auto &[name, tensor] : metadata.tensors)
      writePath(metadata, name);
    for (const auto &[name, place] : metadata.values)
      writePath(metadata, name);
    out.endItems();
    out.string("storage_data");
    out.dict();
    out.mark();
    for (const auto &[name, tensor] : metadata.tensors)
      for (size_t i = 0; i < tensor.chunks.size(); ++i) {
        writeIndex(name, int64_t(i), &tensor.chunks[i].chunk);
        writePlace(tensor.chunks[i].place);
      }
    for (const auto &[name, place] : metadata.values) {
      writeIndex(name, std::nullopt, nullptr);
      writePlace(place);
    }
    out.endItems();
    out.string("storage_meta");
    out.none();
    out.string("version");
    out.string(kVersion);
    out.string(kHashFollows);
    out.boolean(true);
    out.endItems();
    out.set();
    std::string pickle = std::move(out).finish();
    return pickle + fsdp::hashBytes(pickle);
  }

private:
  void writeTensor(const DcpMetadata::Tensor &tensor) {
    out.object(kTensor);
    out.dict();
    out.mark();
    out.string("properties");
    out.object(kProperties);
    out.mark();
    out.global(torchName(tensor.spec.dtype));
    out.global(kLayout);
    out.mark();
    out.string(kStrided);
    out.endTuple();
    out.call();
    out.boolean(false); // requires_grad
    out.global(kMemoryFormat);
    const int64_t contiguous = 0;
    out.extents({&contiguous, 1});
    out.call();
    out.boolean(false); // pin_memory
    // Five, without the strides: PyTorch before 2.14 accepts no other number.
    out.endTuple();
    out.set();
    out.string("size");
    out.size(tensor.spec.shape);
    out.string("chunks");
    out.list();
    out.mark();
    for (const DcpMetadata::SavedChunk &chunk : tensor.chunks) {
      out.object(kChunk);
      out.dict();
      out.mark();
      out.string("offsets");
      out.size(chunk.chunk.offsets);
      out.string("sizes");
      out.size(chunk.chunk.sizes);
      out.endItems();
      out.set();
    }
    out.endAppends();
    out.endItems();
    out.set();
  }

  void writePath(const DcpMetadata &metadata, const std::string &name) {
    out.string(name);
    auto known = metadata.paths.find(name);
    nlohmann::json path = {name};
    if (known != metadata.paths.end())
      path = known->second;
    else
      for (std::string_view dict : kDicts)
        if (name.starts_with(dict))
          path = {dict.substr(0, dict.size() - 1), name.substr(dict.size())};
    out.value(path, /*tuples=*/true);
  }

  void writeIndex(std::string_view name, std::optional<int64_t> index,
                  const Chunk *chunk) {
    out.object(kIndex);
    out.dict();
    out.mark();
    out.string("fqn");
    out.string(name);
    out.string("index");
    if (index)
      out.integer(*index);
    else
      out.none();
    if (chunk) {
      out.string("offset");
      out.size(chunk->offsets);
    }
    out.endItems();
    out.set();
  }

  void writePlace(const DcpPlace &place) {
    out.object(kStorageInfo);
    out.dict();
    out.mark();
    out.string("relative_path");
    out.string(place.file);
    out.string("offset");
    out.integer(place.offset);
    out.string("length");
    out.integer(place.length);
    out.endItems();
    out.set();
  }

  PickleWriter out;
};

} // namespace

std::string writeDcpMetadata(const DcpMetadata &metadata) {
  return Writer().write(metadata);
}

} // namespace fsdp::runtime
