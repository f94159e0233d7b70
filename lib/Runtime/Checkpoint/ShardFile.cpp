//===- ShardFile.cpp - what one rank saves --------------------------------===//
#include "fsdp/Runtime/Checkpoint/ShardFile.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <set>

namespace fsdp::runtime {

using nlohmann::ordered_json;

namespace {

constexpr size_t kDataAlignment = 4096;

/// The real dtype of which a complex one that the format lacks is a pair.
plan::DType halfOf(plan::DType dtype) {
  return dtype == plan::DType::Complex32 ? plan::DType::Float16
                                         : plan::DType::Float64;
}

std::string printHeader(const std::string &attempt,
                        const std::vector<ShardTensor> &tensors) {
  ordered_json header = ordered_json::object(), offsets = header;
  header["__metadata__"] = nullptr; // the first
  uint64_t begin = 0;
  for (const ShardTensor &tensor : tensors) {
    std::vector<int64_t> shape = tensor.chunk.sizes, at = tensor.chunk.offsets;
    std::string_view dtype = safeTensorsName(tensor.spec.dtype);
    if (dtype.empty()) {
      dtype = safeTensorsName(halfOf(tensor.spec.dtype));
      shape.push_back(2);
      at.push_back(0);
    }
    offsets[tensor.name] = {{"saved_offsets", at}};
    header[tensor.name] = {
        {"dtype", dtype},
        {"shape", shape},
        {"data_offsets", {begin, begin + tensor.data.size()}}};
    begin += tensor.data.size();
  }
  header["__metadata__"] = {{"format", "pt"},
                            {"DCP_VERSION", "1.0"},
                            {"DCP_SHARDING_INFO", offsets.dump()},
                            {"attempt", attempt}};
  std::string text = header.dump();
  size_t length = 8 + text.size();
  text.append((kDataAlignment - length % kDataAlignment) % kDataAlignment, ' ');
  return text;
}

} // namespace

std::string shardFileName(int64_t rank) {
  char name[80];
  std::snprintf(name, sizeof(name),
                "shard-%05lld-model-00001-of-00001.safetensors",
                static_cast<long long>(rank + 1));
  return name;
}

Manifest::File writeShardFile(const std::string &folder, int64_t rank,
                              const std::string &attempt,
                              const std::vector<ShardTensor> &tensors,
                              Progress &progress,
                              DurableFile::Options options) {
  std::set<std::string> names;
  for (const ShardTensor &tensor : tensors)
    if (!names.insert(tensor.name).second)
      throw RunError("two tensors of the checkpoint are named \"" +
                     tensor.name + "\"");
  Manifest::File result;
  result.name = shardFileName(rank);
  progress.reach(SavePoint::Open);
  DurableFile file(folder + "/" + result.name, progress, std::move(options));
  std::string header = printHeader(attempt, tensors);
  uint64_t length = header.size();
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(header);
  for (const ShardTensor &tensor : tensors) {
    std::string_view bytes(reinterpret_cast<const char *>(tensor.data.data()),
                           tensor.data.size());
    result.chunks.push_back({tensor.name, tensor.chunk, file.size(),
                             bytes.size(), hashBytes(bytes)});
    file.write(tensor.data);
  }
  file.finish();
  result.bytes = file.size();
  result.hash = file.hash();
  return result;
}

} // namespace fsdp::runtime
