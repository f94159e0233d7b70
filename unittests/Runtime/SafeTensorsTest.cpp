//===- SafeTensorsTest.cpp - reading, writing, corrupt files --------------===//
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

namespace fsdp::test {
namespace {

using runtime::SafeTensors;
using testing::HasSubstr;

std::string fileOf(const std::string &header, size_t dataBytes) {
  std::string text(8, '\0');
  for (size_t i = 0; i < 8; ++i)
    text[i] = char(header.size() >> (8 * i));
  return text + header + std::string(dataBytes, '\0');
}

std::string errorOf(const std::string &content) {
  ScratchDir dir;
  writeText(dir / "f.safetensors", content);
  try {
    SafeTensors file(dir / "f.safetensors");
  } catch (const runtime::InputError &error) {
    return error.what();
  }
  return "no error";
}

std::string tensor(const std::string &dtype, const std::string &shape,
                   const std::string &offsets) {
  return R"({"a": {"dtype": ")" + dtype + R"(", "shape": )" + shape +
         R"(, "data_offsets": )" + offsets + "}}";
}

TEST(SafeTensors, RoundTrips) {
  ScratchDir dir;
  Tensors written = {
      {"a", at::arange(6, at::kFloat).view({2, 3})},
      {"empty", at::zeros({0, 4})},
      {"n\"ame", at::arange(5, at::kLong)},
      {"scalar", at::zeros({})},
  };
  writeTensors(dir / "t.safetensors", written);
  Tensors read = readTensors(dir / "t.safetensors");
  ASSERT_EQ(read.size(), written.size());
  for (const auto &[name, tensor] : written)
    EXPECT_TRUE(read.at(name).equal(tensor)) << name;
  // Nothing but the file itself is left.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir / ""),
                          std::filesystem::directory_iterator()),
            1);
}

TEST(SafeTensors, HashIsXxh3) {
  ScratchDir dir;
  // xxhash.xxh3_128_hexdigest(b'\x02' + 7 * b'\0' + b'{}')
  writeText(dir / "t", fileOf("{}", 0));
  EXPECT_EQ(SafeTensors(dir / "t").hash(),
            "xxh3:19aae81a9fc6b75c6d333529e3c47542");
}

TEST(SafeTensors, RefusesCorruptFiles) {
  EXPECT_THAT(errorOf(""), HasSubstr("expected at least 8 bytes, got 0"));
  EXPECT_THAT(errorOf(std::string(8, '\xff')),
              HasSubstr("it claims a header of"));
  EXPECT_THAT(errorOf(fileOf("{", 0)), HasSubstr("not a json object"));
  EXPECT_THAT(errorOf(fileOf("[]", 0)), HasSubstr("not a json object"));
  EXPECT_THAT(errorOf(fileOf(std::string(1000, '['), 0)),
              HasSubstr("not a json object"));
  EXPECT_THAT(errorOf(fileOf(R"({"a": 1})", 0)),
              HasSubstr("expected dtype, shape and data_offsets"));
  EXPECT_THAT(errorOf(fileOf(tensor("F7", "[1]", "[0, 4]"), 4)),
              HasSubstr("unknown dtype \"F7\""));
  EXPECT_THAT(errorOf(fileOf(tensor("F32", "[-1]", "[0, 4]"), 4)),
              HasSubstr("bad shape"));
  EXPECT_THAT(
      errorOf(fileOf(tensor("F32", "[4000000000, 4000000000]", "[0, 4]"), 4)),
      HasSubstr("bad shape"));
  EXPECT_THAT(
      errorOf(fileOf(tensor("F32", "[18446744073709551615]", "[0, 4]"), 4)),
      HasSubstr("bad shape"));
  EXPECT_THAT(errorOf(fileOf(tensor("F32", "[1]", "[0, 4]"), 3)),
              HasSubstr("lie outside the file's 3 bytes"));
  EXPECT_THAT(errorOf(fileOf(tensor("F32", "[1]", "[4, 0]"), 8)),
              HasSubstr("lie outside"));
  EXPECT_THAT(errorOf(fileOf(tensor("F32", "[2]", "[0, 4]"), 4)),
              HasSubstr("expected 8 bytes for float32[2], got 4"));
  std::string twice = tensor("F32", "[1]", "[0, 4]");
  twice = twice.substr(0, twice.size() - 1) + ", " + twice.substr(1);
  EXPECT_THAT(errorOf(fileOf(twice, 4)),
              HasSubstr("two tensors are named \"a\""));
}

TEST(SafeTensors, RefusesEveryTruncation) {
  ScratchDir dir;
  writeTensors(dir / "t", {{"a", at::zeros({3})}});
  std::string text = readText(dir / "t");
  for (size_t size = 0; size < text.size(); ++size)
    EXPECT_NE(errorOf(text.substr(0, size)), "no error") << size;
}

TEST(SafeTensors, KnowsWhenItsDataChanged) {
  ScratchDir dir;
  writeTensors(dir / "t", {{"a", at::zeros({3})}, {"b", at::zeros({2})}});
  std::string text = readText(dir / "t");
  EXPECT_NO_THROW(runtime::SafeTensors(dir / "t").checkHash());
  for (size_t byte = text.size() - 20; byte < text.size(); ++byte) {
    std::string other = text;
    other[byte] = char(other[byte] ^ 4);
    writeText(dir / "t", other);
    EXPECT_THROW(runtime::SafeTensors(dir / "t").checkHash(),
                 runtime::InputError)
        << byte;
  }
}

} // namespace
} // namespace fsdp::test
