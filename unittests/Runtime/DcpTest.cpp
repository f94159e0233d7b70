//===- DcpTest.cpp - checkpoints of torch.distributed.checkpoint ----------===//
//
// That PyTorch reads what is written here, and the other way round, is tested
// in test/parity/test_interchange.py.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Checkpoint/Dcp.h"
#include "Support/Fixtures.h"
#include "Support/Sanitizers.h"
#include "fsdp/Runtime/Checkpoint/TorchItems.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <set>

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;
using runtime::Chunk;
using runtime::DcpMetadata;
using runtime::SavedState;
using runtime::SavedTensor;
using testing::AllOf;
using testing::HasSubstr;

const std::string kFromPyTorch = FSDP_TEST_INPUTS "/dcp/two-ranks";

std::span<const std::byte> bytesOf(const std::string &text) {
  return std::as_bytes(std::span(text));
}

/// All elements of a tensor, as bytes.
std::string wholeOf(const SavedTensor &tensor) {
  std::string bytes(size_t(tensor.spec.numBytes()), '\0');
  Chunk box{std::vector<int64_t>(tensor.spec.shape.size(), 0),
            tensor.spec.shape};
  runtime::copyBox(tensor, box, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

/// What a checkpoint says, to be compared.
std::string contentOf(const SavedState &state) {
  std::string text;
  for (const auto &[name, tensor] : state.tensors)
    text += name + std::string(plan::dtypeName(tensor.spec.dtype)) +
            nlohmann::json(tensor.spec.shape).dump() + wholeOf(tensor);
  for (const auto &[name, value] : state.values)
    text += name + value.dump();
  return text;
}

/// What ranks save: "weight", of 5 rows, and a value.
class Part {
public:
  Part() : data(10) {
    std::iota(data.begin(), data.end(), 1.0f);
    state.values["train_state.step"] = 3;
  }
  /// Adds rows of the weight.
  Part &rows(int64_t begin, int64_t count) {
    SavedTensor &weight = state.tensors["weight"];
    weight.spec = {{5, 2}, plan::DType::Float32};
    weight.chunks.push_back({{{begin, 0}, {count, 2}},
                             std::as_bytes(std::span(data).subspan(
                                 size_t(2 * begin), size_t(2 * count))),
                             "memory"});
    return *this;
  }

  std::vector<float> data;
  SavedState state;
};

class Dcp : public testing::Test {
  ScratchDir dir;

protected:
  std::string folder = dir / "step-3";

  std::string error() {
    return errorOf([&] { runtime::readDcp(folder); });
  }
  std::string file(const std::string &name) { return folder + "/" + name; }
  void copyFromPyTorch() { fs::copy(kFromPyTorch, folder); }
};

TEST_F(Dcp, ReadsWhatPyTorchWrote) {
  SavedState state = runtime::readDcp(kFromPyTorch);
  ASSERT_EQ(state.tensors.size(), 4u);
  const SavedTensor &weight = state.tensors.at("model.weight");
  EXPECT_EQ(weight.spec, (plan::TensorSpec{{5, 2}, plan::DType::Float32}));
  EXPECT_EQ(weight.chunks.size(), 2u);
  std::vector<float> floats(10);
  std::memcpy(floats.data(), wholeOf(weight).data(), 40);
  for (int i = 0; i < 10; ++i)
    EXPECT_EQ(floats[size_t(i)], float(i));
  EXPECT_EQ(wholeOf(state.tensors.at("model.row")),
            std::string("\x00\x00\x80\x3f\x00\x40", 6));
  EXPECT_EQ(wholeOf(state.tensors.at("turned")),
            std::string("\0\0\3\0\1\0\4\0\2\0\5\0", 12));
  const SavedTensor &step = state.tensors.at("optimizer.state.weight.step");
  EXPECT_EQ(step.spec, plan::TensorSpec{});
  EXPECT_EQ(state.values.at("lr_scheduler.last_epoch"), 2);
  EXPECT_EQ(state.values.at("options.betas"), nlohmann::json({0.9, 0.999}));
  EXPECT_EQ(state.values.at("options.names.1.b"), nullptr);
  EXPECT_EQ(state.values.at("options.raw"), nlohmann::json::binary({0, 255}));
  EXPECT_EQ(state.paths.at("options.names.1.b"),
            nlohmann::json({"options", "names", 1, "b"}));
}

TEST_F(Dcp, WritesWhatItReads) {
  SavedState state = runtime::readDcp(kFromPyTorch);
  runtime::writeDcp(folder, state);
  SavedState again = runtime::readDcp(folder);
  EXPECT_EQ(contentOf(again), contentOf(state));
  EXPECT_EQ(again.paths, state.paths);
}

TEST_F(Dcp, IsWrittenByRanks) {
  fs::create_directory(folder);
  Part first, second;
  first.rows(0, 3);
  second.rows(3, 2).rows(5, 0).state.values.clear();
  // Nothing is there before it is finished.
  std::vector<DcpMetadata> parts = {
      runtime::writeDcpPart(folder, 0, first.state),
      runtime::writeDcpPart(folder, 1, second.state)};
  EXPECT_THAT(error(), HasSubstr(".metadata: not found"));
  runtime::finishDcp(folder, parts);
  Part whole;
  whole.rows(0, 5);
  SavedState state = runtime::readDcp(folder);
  EXPECT_EQ(contentOf(state), contentOf(whole.state));
  EXPECT_EQ(state.tensors.at("weight").chunks.size(), 2u);
  EXPECT_EQ(state.paths.at("train_state.step"),
            nlohmann::json({"train_state", "step"}));
}

TEST_F(Dcp, HasTensorsOfEveryDType) {
  SavedState state;
  std::string bytes(16 * 6, '\x01');
  for (int i = 0; i <= int(plan::DType::Complex128); ++i) {
    plan::TensorSpec spec{{3, 2}, plan::DType(i)};
    state.tensors["t" + std::to_string(i)] = {
        spec,
        {{{{0, 0}, {3, 2}},
          bytesOf(bytes).first(size_t(spec.numBytes())),
          ""}}};
  }
  state.tensors["empty"] = {{{0, 4}, plan::DType::Float32},
                            {{{{0, 0}, {0, 4}}, {}, ""}}};
  runtime::writeDcp(folder, state);
  EXPECT_EQ(contentOf(runtime::readDcp(folder)), contentOf(state));
}

TEST_F(Dcp, RefusesToFinishWhatIsNotWhole) {
  fs::create_directory(folder);
  auto finish = [&](std::vector<Part> parts) {
    return errorOf([&] {
      std::vector<DcpMetadata> written;
      for (const Part &part : parts)
        written.push_back(
            runtime::writeDcpPart(folder, int64_t(written.size()), part.state));
      runtime::finishDcp(folder, written);
    });
  };
  Part first;
  first.rows(0, 3);
  EXPECT_THAT(finish({first}), HasSubstr("no file has [3:5, 0:2]"));
  Part rest;
  rest.rows(3, 2);
  EXPECT_THAT(finish({first, rest}),
              AllOf(HasSubstr("\"train_state.step\" appears twice"),
                    HasSubstr("__0_0.distcp and __1_0.distcp")));
  rest.state.values.clear();
  Part overlap = rest;
  overlap.rows(2, 1);
  EXPECT_THAT(finish({first, overlap}),
              AllOf(HasSubstr("[2:3, 0:2] of float32[5, 2] appears twice"),
                    HasSubstr("__0_0.distcp and "), HasSubstr("__1_0.distcp")));
  Part other = rest;
  other.state.tensors["weight"].spec.shape = {6, 2};
  EXPECT_THAT(finish({first, other}), HasSubstr("of every rank"));
  EXPECT_EQ(finish({first, rest}), "no error");
}

TEST_F(Dcp, WritesToNewFoldersOnly) {
  Part whole;
  whole.rows(0, 5);
  runtime::writeDcp(folder, whole.state);
  EXPECT_THAT(errorOf([&] { runtime::writeDcp(folder, whole.state); }),
              HasSubstr("expected a new or empty folder"));
}

TEST_F(Dcp, NamesMissingAndForeignFiles) {
  copyFromPyTorch();
  writeText(file("__2_0.distcp"), "");
  EXPECT_EQ(error(), "no error"); // of a rank that had nothing to save
  fs::copy(file("__1_0.distcp"), file("__7_0.distcp"));
  EXPECT_THAT(error(), HasSubstr("__7_0.distcp: a file of another checkpoint"));
  fs::remove(file("__7_0.distcp"));
  fs::rename(file("__0_0.distcp"), file("gone"));
  EXPECT_THAT(error(), HasSubstr("__0_0.distcp: cannot open"));
  // That of the other rank in its place.
  fs::copy(file("__1_0.distcp"), file("__0_0.distcp"));
  EXPECT_THAT(error(), HasSubstr("__0_0.distcp: expected 3154 bytes of items"));
  fs::remove(file("__0_0.distcp"));
  fs::create_directory(file("__0_0.distcp"));
  EXPECT_THAT(error(), HasSubstr("expected a regular file"));
  fs::remove(file(".metadata"));
  EXPECT_THAT(error(), HasSubstr(".metadata: not found"));
}

TEST_F(Dcp, NamesItemsOfOtherShapes) {
  // Two items of equal length, exchanged.
  Part first, second;
  SavedTensor &weight = first.rows(0, 5).state.tensors["weight"];
  SavedTensor other = weight;
  other.spec.shape = {2, 5};
  other.chunks[0].chunk = {{0, 0}, {2, 5}};
  first.state.tensors["other"] = other;
  fs::create_directory(folder);
  DcpMetadata part = runtime::writeDcpPart(folder, 0, first.state);
  std::swap(part.tensors.at("weight").chunks[0].place,
            part.tensors.at("other").chunks[0].place);
  runtime::finishDcp(folder, {part});
  EXPECT_THAT(error(), AllOf(HasSubstr("__0_0.distcp: item \"other\""),
                             HasSubstr("expected float32[2, 5], got "
                                       "float32[5, 2]")));
}

/// Changes metadata of a whole checkpoint; all of it must be refused.
TEST_F(Dcp, RefusesMetadataOfOtherFiles) {
  Part whole;
  whole.rows(0, 2).rows(2, 3);
  fs::create_directory(folder);
  const DcpMetadata good = runtime::writeDcpPart(folder, 0, whole.state);
  auto refused = [&](const std::function<void(DcpMetadata &)> &change) {
    DcpMetadata bad = good;
    change(bad);
    writeText(file(".metadata"), runtime::writeDcpMetadata(bad));
    return error();
  };
  EXPECT_EQ(refused([](DcpMetadata &) {}), "no error");
  using Tensor = DcpMetadata::Tensor;
  auto chunk = [](DcpMetadata &metadata) -> DcpMetadata::SavedChunk & {
    return metadata.tensors.at("weight").chunks[0];
  };
  for (std::string name :
       {"../step-3/__0_0.distcp", "/etc/passwd", "..", ".", "", "a/b"})
    EXPECT_THAT(
        refused([&](DcpMetadata &bad) { chunk(bad).place.file = name; }),
        AllOf(HasSubstr(".metadata: \"weight\": expected a file in the "
                        "folder, got \"" +
                        name)));
  for (int64_t offset : {int64_t(-1), INT64_MAX})
    EXPECT_THAT(
        refused([&](DcpMetadata &bad) { chunk(bad).place.offset = offset; }),
        HasSubstr("expected a part of __0_0.distcp"));
  EXPECT_THAT(refused([&](DcpMetadata &bad) { chunk(bad).place.length = 0; }),
              HasSubstr("expected a part of __0_0.distcp"));
  EXPECT_THAT(refused([&](DcpMetadata &bad) { ++chunk(bad).place.offset; }),
              HasSubstr("expected an item at byte"));
  EXPECT_THAT(refused([&](DcpMetadata &bad) { ++chunk(bad).place.length; }),
              HasSubstr("expected an item at byte"));
  EXPECT_THAT(refused([](DcpMetadata &bad) {
                Tensor &weight = bad.tensors.at("weight");
                weight.chunks.pop_back();
              }),
              HasSubstr("__0_0.distcp: expected "));
  EXPECT_THAT(refused([&](DcpMetadata &bad) {
                bad.values["other"] = bad.values.at("train_state.step");
              }),
              HasSubstr("__0_0.distcp: expected an item at byte"));
  EXPECT_THAT(refused([&](DcpMetadata &bad) {
                bad.tensors.at("weight").spec.dtype = plan::DType::Int32;
              }),
              HasSubstr("expected int32[2, 2], got float32[2, 2]"));
  EXPECT_THAT(refused([&](DcpMetadata &bad) {
                bad.tensors.at("weight").spec.shape = {6, 2};
              }),
              HasSubstr("no file has [5:6, 0:2]"));
  EXPECT_THAT(refused([&](DcpMetadata &bad) {
                bad.tensors.at("weight").spec.shape = {INT64_MAX, 2};
              }),
              HasSubstr("less than 2^63 bytes"));
  EXPECT_THAT(refused([](DcpMetadata &bad) {
                bad.paths["weight"] = {"model", "weight"};
              }),
              HasSubstr("expected the keys of an item, got \"model.weight\""));
}

/// Under AddressSanitizer one bit of each byte is flipped, the next of the
/// next.
constexpr size_t kBitStep = kAddressSanitizer ? 9 : 1;

size_t numFlips(const std::string &text) {
  return (8 * text.size() + kBitStep - 1) / kBitStep;
}

/// Calls `check` with each text that one bit makes of `text`.
void flipBits(const std::string &text,
              const std::function<void(const std::string &, size_t)> &check) {
  std::string other = text;
  for (size_t bit = 0; bit < 8 * text.size(); bit += kBitStep) {
    other[bit / 8] = char(other[bit / 8] ^ 1 << bit % 8);
    check(other, bit);
    other[bit / 8] = text[bit / 8];
  }
}

/// Changes a file as flipBits does, and cuts it at every length, with `check`
/// after each. In place: to write it anew takes far longer.
void damage(const std::string &path, const std::function<void()> &check) {
  const std::string text = readText(path);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  auto put = [&](size_t at, char byte) {
    file.seekp(std::streamoff(at));
    file.put(byte).flush();
  };
  flipBits(text, [&](const std::string &other, size_t bit) {
    put(bit / 8, other[bit / 8]);
    check();
    put(bit / 8, text[bit / 8]);
  });
  for (size_t size = text.size(); size-- > 0;) {
    fs::resize_file(path, size);
    check();
  }
  writeText(path, text);
}

TEST_F(Dcp, DetectsEveryBitAndTruncation) {
  Part whole;
  whole.rows(0, 2).rows(2, 3);
  runtime::writeDcp(folder, whole.state);
  for (std::string name : {".metadata", "__0_0.distcp"}) {
    std::string text = readText(file(name));
    size_t undetected = 0;
    damage(file(name), [&] { undetected += error() == "no error"; });
    EXPECT_EQ(undetected, 0u) << name << " of " << numFlips(text) + text.size();
    writeText(file(name), text + '\0');
    EXPECT_NE(error(), "no error");
    writeText(file(name), text);
    EXPECT_EQ(error(), "no error");
  }
}

/// Each item has a checksum, also where PyTorch wrote it.
TEST_F(Dcp, DetectsEveryBitOfPyTorchsItems) {
  for (std::string name : {"__0_0.distcp", "__1_0.distcp"}) {
    std::string text = readText(kFromPyTorch + "/" + name);
    DcpMetadata metadata = runtime::readDcpMetadata(
        "file", bytesOf(readText(kFromPyTorch + "/.metadata")));
    auto read = [&](const std::string &bytes, bool isTensor) {
      return errorOf([&] {
        if (isTensor)
          runtime::readTorchTensor("item", bytesOf(bytes));
        else
          runtime::readTorchValue("item", bytesOf(bytes));
      });
    };
    auto check = [&](const runtime::DcpPlace &place, bool isTensor) {
      if (place.file != name)
        return;
      std::string item =
          text.substr(size_t(place.offset), size_t(place.length));
      EXPECT_EQ(read(item, isTensor), "no error");
      flipBits(item, [&](const std::string &other, size_t bit) {
        ASSERT_NE(read(other, isTensor), "no error") << bit;
      });
      for (size_t size = 0; size < item.size(); ++size)
        ASSERT_NE(read(item.substr(0, size), isTensor), "no error") << size;
    };
    for (const auto &[fqn, tensor] : metadata.tensors)
      for (const auto &[chunk, place] : tensor.chunks)
        check(place, true);
    for (const auto &[fqn, place] : metadata.values)
      check(place, false);
  }
}

/// PyTorch's .metadata has no checksum. What one bit changes there unnoticed
/// has no meaning here, as the folder it was saved to.
TEST_F(Dcp, KeepsDataWhereMetadataIsNotProtected) {
  copyFromPyTorch();
  std::string text = readText(file(".metadata"));
  SavedState good = runtime::readDcp(folder);
  const std::string content = contentOf(good);
  // Without names.
  auto anonymous = [](const SavedState &state) {
    std::multiset<std::string> all;
    for (const auto &[name, tensor] : state.tensors)
      all.insert(runtime::describe(tensor.spec) + wholeOf(tensor));
    for (const auto &[name, value] : state.values)
      all.insert(value.dump());
    return all;
  };
  size_t refused = 0, same = 0, renamed = 0, other = 0;
  damage(file(".metadata"), [&] {
    try {
      SavedState state = runtime::readDcp(folder);
      if (contentOf(state) == content)
        ++same;
      else if (anonymous(state) == anonymous(good))
        ++renamed;
      else
        ++other;
    } catch (const runtime::InputError &) {
      ++refused;
    }
  });
  EXPECT_EQ(other, 0u);
  // With several ranks, each name stands there more than once.
  EXPECT_EQ(renamed, 0u);
  EXPECT_EQ(refused + same, numFlips(text) + text.size());
  // As a share of bits; every truncation is refused.
  EXPECT_LT(same, numFlips(text) / 20);
  RecordProperty("same", int(same));
}

TEST_F(Dcp, RefusesOtherObjects) {
  // torch.save of a class: its name is not known.
  std::string item;
  runtime::writeTorchValue({1, 2}, true,
                           [&](std::string_view bytes) { item += bytes; });
  EXPECT_EQ(runtime::readTorchValue("f", bytesOf(item)),
            nlohmann::json({1, 2}));
  EXPECT_THAT(errorOf([&] { runtime::readTorchTensor("f", bytesOf(item)); }),
              HasSubstr("f: tensor: expected a call, got a tuple"));
  item.clear();
  std::vector<float> data = {1, 2};
  runtime::writeTorchTensor({{2}, plan::DType::Float32},
                            std::as_bytes(std::span(data)),
                            [&](std::string_view bytes) { item += bytes; });
  EXPECT_THAT(errorOf([&] { runtime::readTorchValue("f", bytesOf(item)); }),
              HasSubstr("f: expected a value, got tensors with it"));
}

} // namespace
} // namespace fsdp::test
