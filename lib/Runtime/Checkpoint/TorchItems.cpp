//===- TorchItems.cpp - what torch.save writes of one object --------------===//
#include "fsdp/Runtime/Checkpoint/TorchItems.h"
#include "fsdp/Runtime/Checkpoint/Chunks.h"
#include "fsdp/Runtime/Checkpoint/Pickle.h"
#include "fsdp/Runtime/Checkpoint/PickleWriter.h"
#include "fsdp/Runtime/Checkpoint/StoredZip.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Memory/Layout.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

namespace fsdp::runtime {

using plan::DType;

namespace {

constexpr std::string_view kRebuild = "torch._utils _rebuild_tensor_v2",
                           kRebuildTyped = "torch._utils _rebuild_tensor_v3",
                           kUntyped = "torch.storage UntypedStorage",
                           kOrderedDict = "collections OrderedDict";
constexpr std::string_view kPickle = "data.pkl", kElements = "data/0";

/// Of a tensor of PyTorch's.
constexpr size_t kMaxDims = 64;

/// Dtypes with a storage of their own; those of others are untyped.
constexpr std::array<std::pair<std::string_view, DType>, 12> kStorages = {{
    {"torch FloatStorage", DType::Float32},
    {"torch DoubleStorage", DType::Float64},
    {"torch HalfStorage", DType::Float16},
    {"torch BFloat16Storage", DType::BFloat16},
    {"torch LongStorage", DType::Int64},
    {"torch IntStorage", DType::Int32},
    {"torch ShortStorage", DType::Int16},
    {"torch CharStorage", DType::Int8},
    {"torch ByteStorage", DType::UInt8},
    {"torch BoolStorage", DType::Bool},
    {"torch ComplexFloatStorage", DType::Complex64},
    {"torch ComplexDoubleStorage", DType::Complex128},
}};

/// By their names in a pickle.
const std::map<std::string, DType, std::less<>> &torchNames() {
  static const std::map<std::string, DType, std::less<>> names = [] {
    std::map<std::string, DType, std::less<>> names;
    for (int i = 0; i <= int(DType::Complex128); ++i)
      names.emplace(torchName(DType(i)), DType(i));
    return names;
  }();
  return names;
}

const std::vector<std::string_view> &tensorGlobals() {
  static const std::vector<std::string_view> globals = [] {
    std::vector<std::string_view> globals = {kRebuild, kRebuildTyped, kUntyped,
                                             kOrderedDict};
    for (const auto &[name, dtype] : kStorages)
      globals.push_back(name);
    for (const auto &[name, dtype] : torchNames())
      globals.push_back(name);
    return globals;
  }();
  return globals;
}

constexpr std::array<std::string_view, 2> kValueGlobals = {"_codecs encode",
                                                           "__builtin__ bytes"};

using Records = std::map<std::string, std::span<const std::byte>>;

/// The records of an item, without those that say how it was written, which
/// must say what is known.
Records openItem(const std::string &place, std::span<const std::byte> item) {
  Records records = readStoredZip(place, item);
  auto expect = [&](const char *name, bool required,
                    std::initializer_list<std::string_view> known) {
    auto it = records.find(name);
    if (it == records.end() && !required)
      return;
    std::string_view got;
    if (it != records.end())
      got = {reinterpret_cast<const char *>(it->second.data()),
             it->second.size()};
    if (std::find(known.begin(), known.end(), got) == known.end())
      throw InputError(place + ": expected " + name + " \"" +
                       std::string(*known.begin()) + "\", got \"" +
                       std::string(got) + "\"");
    records.erase(name);
  };
  expect("version", true, {"3\n", "3"});
  expect("byteorder", false, {"little"});
  expect(".format_version", false, {"1"});
  records.erase(".storage_alignment");
  records.erase(".data/serialization_id");
  if (!records.contains(std::string(kPickle)))
    throw InputError(place + ": expected a record " + std::string(kPickle));
  return records;
}

/// Every byte of the pickle's record is its own.
Pickle openPickle(const std::string &place, const Records &records,
                  std::span<const std::string_view> globals) {
  std::span<const std::byte> bytes = records.at(std::string(kPickle));
  Pickle pickle(place, bytes, globals);
  if (pickle.size() != bytes.size())
    pickle.fail(kPickle, "expected its end at byte " +
                             std::to_string(pickle.size()) + ", got " +
                             std::to_string(bytes.size()) + " bytes");
  return pickle;
}

/// What a tensor's elements lie in.
struct Storage {
  std::string record;
  std::optional<DType> dtype; ///< none: untyped
  int64_t elements = 0;       ///< bytes of an untyped one
};

Storage readStorage(const Pickle &pickle, Pickle::Object object) {
  constexpr std::string_view what = "storage";
  auto parts = pickle.tuple(pickle.persistent(object, what), what);
  if (parts.size() != 5 || pickle.text(parts[0], what) != "storage")
    pickle.fail(what, "expected its class, key, device and size");
  Storage storage;
  if (std::string_view name = pickle.global(parts[1], what); name != kUntyped) {
    auto known = std::find_if(kStorages.begin(), kStorages.end(),
                              [&](auto &pair) { return pair.first == name; });
    if (known == kStorages.end())
      pickle.fail(what, "expected a storage, got " + std::string(name));
    storage.dtype = known->second;
  }
  storage.record = "data/" + std::string(pickle.text(parts[2], what));
  if (std::string_view device = pickle.text(parts[3], what); device != "cpu")
    pickle.fail(what, "expected device cpu, got " + std::string(device));
  storage.elements = pickle.integer(parts[4], what);
  return storage;
}

} // namespace

std::string torchName(DType dtype) {
  return "torch " + std::string(plan::dtypeName(dtype));
}

std::optional<DType> parseTorchName(std::string_view name) {
  auto it = torchNames().find(name);
  return it == torchNames().end() ? std::nullopt : std::optional(it->second);
}

TorchTensor readTorchTensor(const std::string &place,
                            std::span<const std::byte> item) {
  Records records = openItem(place, item);
  Pickle pickle = openPickle(place, records, tensorGlobals());
  constexpr std::string_view what = "tensor";
  bool typed = pickle.isCall(pickle.root(), kRebuildTyped);
  auto parts =
      pickle.arguments(pickle.root(), typed ? kRebuildTyped : kRebuild, what);
  // Further arguments say that the tensor is conjugated, negated or the like.
  if (parts.size() != (typed ? 7 : 6))
    pickle.fail(what, "expected a tensor without further marks");
  Storage storage = readStorage(pickle, parts[0]);
  TorchTensor tensor;
  if (typed == storage.dtype.has_value())
    pickle.fail(what, "expected one dtype");
  if (typed) {
    std::string_view name = pickle.global(parts[6], "dtype");
    auto dtype = parseTorchName(name);
    if (!dtype)
      pickle.fail("dtype", "expected a dtype, got " + std::string(name));
    tensor.spec.dtype = *dtype;
  } else {
    tensor.spec.dtype = *storage.dtype;
  }
  if (pickle.integer(parts[1], "offset") != 0)
    pickle.fail("offset", "expected a tensor that begins its storage");
  tensor.spec.shape = pickle.extents(parts[2], "size");
  plan::Strides strides = pickle.extents(parts[3], "strides");
  pickle.boolean(parts[4], "requires_grad");
  if (!pickle.arguments(parts[5], kOrderedDict, "hooks").empty())
    pickle.fail("hooks", "expected none");

  int64_t bytes = checkedBytes(place, "data", tensor.spec);
  int64_t width = typed ? 1 : plan::byteWidth(tensor.spec.dtype);
  auto data = records.find(storage.record);
  if (data == records.end() || records.size() != 2)
    throw InputError(place + ": expected one record of elements, " +
                     storage.record);
  if (strides.size() != tensor.spec.shape.size() ||
      storage.elements != bytes / width ||
      data->second.size() != uint64_t(bytes))
    throw InputError(place + ": expected " + std::to_string(bytes) +
                     " bytes and one stride per dimension for " +
                     describe(tensor.spec) + ", got " +
                     std::to_string(data->second.size()) + " bytes and " +
                     std::to_string(strides.size()) + " strides");
  tensor.data = data->second;
  if (strides.size() > kMaxDims)
    throw InputError(place + ": expected at most " + std::to_string(kMaxDims) +
                     " dimensions, got " + std::to_string(strides.size()));
  if (bytes == 0)
    return tensor;
  for (size_t dim = 0; dim < strides.size(); ++dim)
    if (strides[dim] == 0 && tensor.spec.shape[dim] > 1)
      pickle.fail("strides", "expected elements that do not overlap");
  if (!plan::areDense(tensor.spec.shape, strides))
    pickle.fail("strides", "expected elements without gaps");
  // Read-only memory, which is only read.
  at::Tensor laid =
      at::from_blob(const_cast<std::byte *>(tensor.data.data()),
                    tensor.spec.shape, strides, scalarType(tensor.spec.dtype));
  if (isLaidOut(laid, {}))
    return tensor;
  auto copy =
      std::make_shared<at::Tensor>(laid.clone(at::MemoryFormat::Contiguous));
  tensor.data = {static_cast<const std::byte *>(copy->const_data_ptr()),
                 size_t(bytes)};
  tensor.memory = std::move(copy);
  return tensor;
}

nlohmann::json readTorchValue(const std::string &place,
                              std::span<const std::byte> item) {
  Records records = openItem(place, item);
  if (records.size() != 1)
    throw InputError(place + ": expected a value, got tensors with it");
  Pickle pickle = openPickle(place, records, kValueGlobals);
  return pickle.value(pickle.root(), "value");
}

namespace {

void writeItem(std::string_view pickle,
               std::optional<std::span<const std::byte>> elements,
               const std::function<void(std::string_view)> &write) {
  std::vector<ZipRecord> records = {{std::string(kPickle), pickle},
                                    {".format_version", "1"},
                                    {".storage_alignment", "64"},
                                    {"byteorder", "little"}};
  if (elements)
    records.push_back(
        {std::string(kElements),
         {reinterpret_cast<const char *>(elements->data()), elements->size()}});
  writeStoredZip(records, write);
}

} // namespace

void writeTorchTensor(const plan::TensorSpec &spec,
                      std::span<const std::byte> data,
                      const std::function<void(std::string_view)> &write) {
  auto storage =
      std::find_if(kStorages.begin(), kStorages.end(),
                   [&](auto &pair) { return pair.second == spec.dtype; });
  bool typed = storage == kStorages.end();
  PickleWriter pickle;
  pickle.global(typed ? kRebuildTyped : kRebuild);
  pickle.mark();
  pickle.mark();
  pickle.string("storage");
  pickle.global(typed ? kUntyped : storage->first);
  pickle.string("0");
  pickle.string("cpu");
  pickle.integer(typed ? int64_t(data.size()) : spec.numElements());
  pickle.endTuple();
  pickle.persistent();
  pickle.integer(0);
  pickle.extents(spec.shape);
  pickle.extents(plan::fullStrides(spec.shape, {}));
  pickle.boolean(false);
  pickle.global(kOrderedDict);
  pickle.extents({});
  pickle.call();
  if (typed)
    pickle.global(torchName(spec.dtype));
  pickle.endTuple();
  pickle.call();
  writeItem(std::move(pickle).finish(), data, write);
}

void writeTorchValue(const nlohmann::json &value, bool tuples,
                     const std::function<void(std::string_view)> &write) {
  PickleWriter pickle;
  pickle.value(value, tuples);
  writeItem(std::move(pickle).finish(), std::nullopt, write);
}

} // namespace fsdp::runtime
