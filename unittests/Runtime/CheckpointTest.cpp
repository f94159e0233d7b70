//===- CheckpointTest.cpp - native checkpoints, whole or refused ----------===//
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Checkpoint/CheckpointFolder.h"
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Checkpoint/SaveProtocol.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Launch/StoreChannel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <bit>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

namespace fsdp::test {
namespace {

using namespace fsdp::runtime;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
namespace fs = std::filesystem;

std::span<const std::byte> bytesOf(const std::vector<float> &numbers) {
  return std::as_bytes(std::span(numbers));
}

/// What a rank of two saves: a matrix by rows, of which the second rank has
/// one, a number that all share, and a tensor of which each has one of its own.
struct Part {
  std::vector<float> rows, count = {7}, own, same = {1, 2};
  SaveRequest request;

  explicit Part(int64_t rank, int64_t ranks = 2, int64_t step = 4) {
    int64_t begin = rank * 2, size = ranks == 1 ? 3 : 2 - rank;
    rows.resize(size_t(size) * 2);
    std::iota(rows.begin(), rows.end(), float(begin * 2 + step));
    own = {float(rank), float(step)};
    request.state.step = step;
    request.state.samples = 10 * step;
    request.state.updates = step - 1;
    request.state.seed = UINT64_MAX;
    request.state.plan = "xxh3:1";
    request.state.worldSize = ranks;
    request.state.scaler = {512, 3};
    request.state.environment = {{"torch", "1"}};
    request.aliases = {{"tied", "w"}};
    request.chunks = {{"w",
                       {{3, 2}, plan::DType::Float32},
                       {{begin, 0}, {size, 2}},
                       bytesOf(rows)}};
    if (rank == 0)
      request.chunks.push_back(
          {"step", {{}, plan::DType::Float32}, {}, bytesOf(count)});
    plan::TensorSpec pair{{2}, plan::DType::Float32};
    request.own = {{"mean", pair, {{0}, {2}}, bytesOf(own)},
                   {"mask", pair, {{0}, {2}}, bytesOf(same)}};
  }
};

/// Saves by ranks that are threads; returns their errors.
std::vector<std::string>
saveBy(int64_t ranks, const std::string &path, int64_t step, int64_t keep = 0,
       std::function<void(int64_t, Part &)> change = {}) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(size_t(ranks), "");
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Part part(rank, ranks, step);
      if (change)
        change(rank, part);
      Position position;
      Progress progress(rank, position, std::nullopt);
      CheckpointFolder folder(path);
      auto channel = makeStoreChannel(store, rank, ranks,
                                      std::chrono::seconds(60), nullptr);
      try {
        if (rank == 0)
          folder.open(std::chrono::milliseconds(0));
        saveCheckpoint(part.request, folder, keep, *channel, progress);
      } catch (const std::exception &error) {
        errors[size_t(rank)] = error.what();
      }
    });
  for (std::thread &thread : threads)
    thread.join();
  return errors;
}

std::vector<std::string> namesIn(const std::string &path) {
  std::vector<std::string> names;
  for (const auto &entry : fs::directory_iterator(path))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<float> read(const NativeCheckpoint &checkpoint,
                        const std::string &name, const Chunk &box) {
  int64_t count = 1;
  for (int64_t size : box.sizes)
    count *= size;
  std::vector<float> numbers(size_t(count), -1);
  checkpoint.read(name, box, std::as_writable_bytes(std::span(numbers)));
  return numbers;
}

/// Why a checkpoint is refused, all of it read; empty: it is not.
std::string refusal(const std::string &path) {
  try {
    NativeCheckpoint checkpoint(path);
    for (size_t i = 0; i < checkpoint.manifest().files.size(); ++i)
      checkpoint.verify(i);
  } catch (const InputError &error) {
    return error.what();
  }
  return "";
}

class Checkpoint : public testing::Test {
protected:
  ScratchDir dir;
  std::string folder = dir / "checkpoints";

  void save(int64_t step, int64_t keep = 0) {
    ASSERT_THAT(saveBy(2, folder, step, keep), ElementsAre("", ""));
  }
  std::string file(int64_t rank) const {
    return folder + "/step-4/" + shardFileName(rank);
  }
};

TEST_F(Checkpoint, HasWhatWasSaved) {
  save(4);
  EXPECT_THAT(namesIn(folder), ElementsAre("step-4"));
  EXPECT_THAT(namesIn(folder + "/step-4"),
              ElementsAre("manifest.json",
                          "shard-00001-model-00001-of-00001.safetensors",
                          "shard-00002-model-00001-of-00001.safetensors"));
  EXPECT_EQ(refusal(folder + "/step-4"), "");
  NativeCheckpoint checkpoint(folder + "/step-4");
  const Manifest &manifest = checkpoint.manifest();
  EXPECT_EQ(manifest.state.step, 4);
  EXPECT_EQ(manifest.state.samples, 40);
  EXPECT_EQ(manifest.state.updates, 3);
  EXPECT_EQ(manifest.state.seed, UINT64_MAX);
  EXPECT_EQ(manifest.state.scaler, (RunState::Scaler{512, 3}));
  EXPECT_EQ(manifest.aliases.at("tied"), "w");
  // Any box, of either file or both.
  EXPECT_THAT(read(checkpoint, "w", {{0, 0}, {3, 2}}),
              ElementsAre(4, 5, 6, 7, 8, 9));
  EXPECT_THAT(read(checkpoint, "w", {{2, 0}, {1, 2}}), ElementsAre(8, 9));
  EXPECT_THAT(read(checkpoint, "w", {{1, 1}, {2, 1}}), ElementsAre(7, 9));
  EXPECT_THAT(read(checkpoint, "step", {}), ElementsAre(7));
  // Of two equal tensors one is saved.
  EXPECT_THAT(read(checkpoint, "mean", {{0}, {2}}), ElementsAre(0, 4));
  EXPECT_THAT(read(checkpoint, "rank.1.mean", {{0}, {2}}), ElementsAre(1, 4));
  EXPECT_TRUE(checkpoint.has("mask"));
  EXPECT_FALSE(checkpoint.has("rank.1.mask"));
  SavedState state = checkpoint.state();
  EXPECT_EQ(state.tensors.size(), 5u);
  checkTiling("", "w", state.tensors.at("w"));
  EXPECT_EQ(std::memcmp(state.tensors.at("w").chunks[0].data.data(),
                        Part(0).rows.data(), 16),
            0);
}

TEST_F(Checkpoint, FilesAreSafetensorsWithAlignedData) {
  save(4);
  uint64_t header = 0;
  std::string text = readText(file(1));
  std::memcpy(&header, text.data(), 8);
  EXPECT_EQ((header + 8) % 4096, 0u);
  EXPECT_EQ(text.size(), header + 8 + 8 + 8);
  auto tree = nlohmann::json::parse(text.substr(8, header));
  EXPECT_EQ(tree["w"]["shape"], (std::vector<int>{1, 2}));
  auto sharding = nlohmann::json::parse(
      tree["__metadata__"]["DCP_SHARDING_INFO"].get<std::string>());
  EXPECT_EQ(sharding["w"]["saved_offsets"], (std::vector<int>{2, 0}));
  EXPECT_EQ(sharding["rank.1.mean"]["saved_offsets"], (std::vector<int>{0}));
  Tensors tensors = readTensors(file(0));
  EXPECT_EQ(tensors.at("step").item<float>(), 7);
}

TEST_F(Checkpoint, ComplexNumbersThatTheFormatLacksArePairs) {
  std::vector<double> numbers = {1, 2, 3, 4};
  auto errors = saveBy(1, folder, 4, 0, [&](int64_t, Part &part) {
    part.request.chunks.push_back({"z",
                                   {{2}, plan::DType::Complex128},
                                   {{0}, {2}},
                                   std::as_bytes(std::span(numbers))});
  });
  ASSERT_THAT(errors, ElementsAre(""));
  EXPECT_EQ(readTensors(file(0)).at("z").sizes(), (std::vector<int64_t>{2, 2}));
  NativeCheckpoint checkpoint(folder + "/step-4");
  std::vector<double> got(2);
  checkpoint.read("z", {{1}, {1}}, std::as_writable_bytes(std::span(got)));
  EXPECT_THAT(got, ElementsAre(3, 4));
}

TEST_F(Checkpoint, EachFlippedBitIsSeen) {
  save(4);
  NativeCheckpoint checkpoint(folder + "/step-4");
  int64_t undetected = 0;
  auto flipAll = [&](const std::string &path, auto isSeen) {
    std::string text = readText(path);
    int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    for (size_t at = 0; at < text.size(); ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        auto byte = char(text[at] ^ (1 << bit));
        ASSERT_EQ(pwrite(fd, &byte, 1, off_t(at)), 1);
        undetected += !isSeen();
      }
      ASSERT_EQ(pwrite(fd, &text[at], 1, off_t(at)), 1);
    }
    close(fd);
  };
  flipAll(folder + "/step-4/manifest.json",
          [&] { return !NativeCheckpoint::looksWhole(folder + "/step-4"); });
  for (size_t index : {0, 1})
    flipAll(file(int64_t(index)), [&] {
      try {
        checkpoint.verify(index);
        return false;
      } catch (const InputError &) {
        return true;
      }
    });
  EXPECT_EQ(undetected, 0);
  EXPECT_EQ(refusal(folder + "/step-4"), "");
}

TEST_F(Checkpoint, ADamagedChunkIsSeenWhereItIsRead) {
  save(4);
  NativeCheckpoint checkpoint(folder + "/step-4");
  std::string text = readText(file(1));
  text[4096] ^= 1;
  writeText(file(1), text);
  EXPECT_THAT(read(checkpoint, "w", {{0, 0}, {2, 2}}), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT([&] { read(checkpoint, "w", {{1, 0}, {2, 2}}); },
              testing::ThrowsMessage<InputError>(HasSubstr("\"w\": damaged")));
}

TEST_F(Checkpoint, EachLengthOfAFileIsSeen) {
  save(4);
  int64_t undetected = 0;
  for (const std::string &name : namesIn(folder + "/step-4")) {
    std::string path = folder + "/step-4/" + name, text = readText(path);
    for (size_t length = text.size(); length-- > 0;) {
      ASSERT_EQ(truncate(path.c_str(), off_t(length)), 0);
      undetected += NativeCheckpoint::looksWhole(folder + "/step-4");
    }
    for (const char *more : {"a", "\n", " "}) {
      writeText(path, text + more);
      undetected += NativeCheckpoint::looksWhole(folder + "/step-4");
    }
    writeText(path, text);
  }
  EXPECT_EQ(undetected, 0);
  EXPECT_EQ(refusal(folder + "/step-4"), "");
}

TEST_F(Checkpoint, EachMissingFileIsNamed) {
  save(4);
  for (const std::string &name : namesIn(folder + "/step-4")) {
    std::string path = folder + "/step-4/" + name, text = readText(path);
    fs::remove(path);
    EXPECT_THAT(refusal(folder + "/step-4"), HasSubstr(name));
    writeText(path, text);
  }
}

TEST_F(Checkpoint, FilesOfTwoAreNoCheckpoint) {
  save(4);
  std::string other = dir / "other";
  ASSERT_THAT(saveBy(2, other, 4), ElementsAre("", ""));
  for (const std::string &name : namesIn(folder + "/step-4")) {
    std::string path = folder + "/step-4/" + name, text = readText(path);
    fs::copy_file(other + "/step-4/" + name, path,
                  fs::copy_options::overwrite_existing);
    EXPECT_THAT(refusal(folder + "/step-4"), HasSubstr("of another checkpoint"))
        << name;
    writeText(path, text);
  }
}

TEST_F(Checkpoint, ManifestsOfOthersAreRefused) {
  save(4);
  std::string path = folder + "/step-4/manifest.json", text = readText(path);
  auto change = [&](const std::string &from, const std::string &to) {
    std::string rest = text.substr(text.find('\n') + 1);
    size_t at = rest.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    rest.replace(at, from.size(), to);
    writeText(path, "{\"hash\": \"" + hashBytes(rest) + "\",\n" + rest);
  };
  for (const auto &[from, to, error] : std::vector<std::array<std::string, 3>>{
           {"\"version\":1", "\"version\":2", "expected version 1"},
           {"\"step\":4", "\"step\":-4", "\"step\": expected a whole"},
           {"\"step\":4", "\"step\":4.5", "\"step\": expected a whole"},
           {"\"shard-00001", "\"../shard-00001", "in its folder"},
           {"\"shard-00002", "\"shard-00001", "appears twice"},
           {"float32", "float31", "unknown dtype"},
           {"[3,2]", "[4,2]", "no file has [3:4, 0:2]"},
           {"[3,2]", "[4611686018427387904,8]", "less than 2^63 bytes"},
           {"[[\"w\",[0,0]", "[[\"w\",[1,0]", "no file has [0:1, 0:2]"},
           {"[[\"w\",", "[[\"v\",", "not one of its tensors"},
           {"fsdp-mlir checkpoint", "another", "expected the format"},
           {"\"files\":[", "\"files\":[[],", "no \"name\""}}) {
    change(from, to);
    EXPECT_THAT(refusal(folder + "/step-4"), HasSubstr(error)) << to;
  }
  writeText(path, std::string(100000, '['));
  EXPECT_THAT(refusal(folder + "/step-4"), HasSubstr("begins with its hash"));
}

TEST_F(Checkpoint, FindsStepsByTheirNamesAlone) {
  for (const char *name :
       {"step-12", "step-3", "step-9.tmp-x", "tmp_step-9", ".trash-step-9",
        "step-09", "step-", "step--1", "step-+1", "step-1 ",
        "step-99999999999999999999", "latest"})
    fs::create_directories(folder + "/" + name);
  EXPECT_THAT(CheckpointFolder(folder).steps(), ElementsAre(3, 12));
  EXPECT_THAT(CheckpointFolder(dir / "none").steps(), IsEmpty());
}

TEST_F(Checkpoint, OneThatIsThereIsNotReplaced) {
  save(4);
  std::string before = readText(folder + "/step-4/manifest.json");
  EXPECT_THAT(saveBy(2, folder, 4),
              testing::Each(HasSubstr("step-4: cannot make the checkpoint")));
  EXPECT_THAT(namesIn(folder), ElementsAre("step-4"));
  EXPECT_EQ(readText(folder + "/step-4/manifest.json"), before);
}

TEST_F(Checkpoint, ADamagedOneIsReplaced) {
  save(4);
  std::string before = readText(folder + "/step-4/manifest.json");
  Position position;
  Progress progress(0, position, std::nullopt);
  CheckpointFolder own(folder);
  own.open();
  own.setDamaged(4);
  Part part(0, 1);
  auto channel = makeStoreChannel({}, 0, 1, std::chrono::seconds(1), nullptr);
  saveCheckpoint(part.request, own, 0, *channel, progress);
  EXPECT_NE(readText(folder + "/step-4/manifest.json"), before);
  EXPECT_THAT(namesIn(folder), ElementsAre("step-4"));
  EXPECT_THROW(saveCheckpoint(part.request, own, 0, *channel, progress),
               SaveError);
}

TEST_F(Checkpoint, KeepsTheNewestWholeOnes) {
  for (int64_t step : {1, 2, 3, 4})
    save(step);
  writeText(folder + "/step-4/manifest.json", "");
  save(5, /*keep=*/2);
  // The damaged one is not counted, and so it is not the reason why a whole
  // one goes.
  EXPECT_THAT(CheckpointFolder(folder).steps(), ElementsAre(3, 4, 5));
  save(6, /*keep=*/2);
  EXPECT_THAT(namesIn(folder), ElementsAre("step-5", "step-6"));
}

TEST_F(Checkpoint, KeepsWhatHasJustBeenSaved) {
  for (int64_t step : {1, 2, 5, 6})
    save(step);
  // A run that went on from an earlier step than the newest.
  save(3, /*keep=*/2);
  EXPECT_THAT(CheckpointFolder(folder).steps(), ElementsAre(3, 6));
}

TEST_F(Checkpoint, RemovesWhatKilledSavesLeft) {
  std::string digits(32, 'a');
  for (const std::string &name :
       {".inflight." + digits, ".trash." + digits, std::string(".inflight.x"),
        ".other." + digits}) {
    fs::create_directories(folder + "/" + name);
    writeText(folder + "/" + name + "/file", "text");
  }
  save(4);
  EXPECT_THAT(namesIn(folder),
              ElementsAre(".inflight.x", ".other." + digits, "step-4"));
}

TEST_F(Checkpoint, RanksThatDisagreeSaveNothing) {
  EXPECT_THAT(
      saveBy(
          2, folder, 4, 0,
          [](int64_t rank, Part &part) { part.request.state.samples += rank; }),
      testing::Each(HasSubstr("rank 1 saves a different plan or step")));
  EXPECT_THAT(saveBy(2, folder, 4, 0,
                     [](int64_t rank, Part &part) {
                       if (rank == 1)
                         part.request.chunks.push_back(part.request.chunks[0]);
                     }),
              testing::Each(HasSubstr("two tensors of the checkpoint")));
  EXPECT_THAT(namesIn(folder), IsEmpty());
}

TEST_F(Checkpoint, TwoRunsDoNotShareAFolder) {
  CheckpointFolder first(folder), second(folder);
  first.open();
  // Not at a second attempt either.
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_THAT([&] { second.open(std::chrono::milliseconds(0)); },
                testing::ThrowsMessage<InputError>(HasSubstr("another run")));
}

TEST_F(Checkpoint, ALateRankIsNamed) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto first =
      makeStoreChannel(store, 0, 3, std::chrono::milliseconds(50), nullptr);
  auto second =
      makeStoreChannel(store, 1, 3, std::chrono::milliseconds(50), nullptr);
  second->gather("here");
  EXPECT_THAT([&] { first->gather(""); },
              testing::ThrowsMessage<RunError>(
                  HasSubstr("rank 2 did not come to the checkpoint")));
  first->stop();
  EXPECT_THROW(first->gather(""), AbortedError);
}

TEST_F(Checkpoint, LongTextsGoThroughAChannel) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::string text(9 << 20, 'x');
  std::vector<std::string> gathered;
  std::thread other([&] {
    auto channel =
        makeStoreChannel(store, 1, 2, std::chrono::seconds(60), nullptr);
    for (int round = 0; round < 2; ++round) {
      channel->gather(text);
      EXPECT_EQ(channel->broadcast(""), text + "!");
    }
  });
  auto channel =
      makeStoreChannel(store, 0, 2, std::chrono::seconds(60), nullptr);
  for (int round = 0; round < 2; ++round) {
    gathered = channel->gather("own");
    EXPECT_EQ(channel->broadcast(gathered.at(1) + "!"), text + "!");
  }
  other.join();
  // What was read is gone, but for who the ranks are and the last parts.
  EXPECT_LE(store->getNumKeys(), 2 + 3);
}

} // namespace
} // namespace fsdp::test
