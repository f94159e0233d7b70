//===- PickleTest.cpp - pickles that are read, and those that are not -----===//
#include "fsdp/Runtime/Checkpoint/Pickle.h"
#include "fsdp/Runtime/Checkpoint/PickleWriter.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

namespace fsdp::test {
namespace {

using namespace std::string_literals;
using nlohmann::json;
using runtime::Pickle;
using runtime::PickleWriter;
using testing::HasSubstr;

constexpr std::array<std::string_view, 4> kGlobals = {
    "_codecs encode", "__builtin__ bytes", "torch Size", "a B"};

Pickle read(const std::string &bytes) {
  return {"file", std::as_bytes(std::span(bytes)), kGlobals};
}

json valueOf(const std::string &bytes) {
  Pickle pickle = read(bytes);
  return pickle.value(pickle.root(), "value");
}

std::string errorOf(const std::string &bytes) {
  try {
    valueOf(bytes);
  } catch (const runtime::InputError &error) {
    return error.what();
  }
  return "no error";
}

// What Python's pickle.dumps gives.
TEST(Pickle, ReadsValues) {
  EXPECT_EQ(valueOf("\x80\x02N."), nullptr);
  EXPECT_EQ(valueOf("\x80\x02\x88."), true);
  EXPECT_EQ(valueOf("\x80\x02K\x07."), 7);
  EXPECT_EQ(valueOf("\x80\x02M\x01\x02."), 513);
  EXPECT_EQ(valueOf("\x80\x02J\xff\xff\xff\xff."), -1);
  EXPECT_EQ(valueOf("\x80\x02\x8a\x05\x00\x00\x00\x00\x80."s), -(1LL << 39));
  EXPECT_EQ(valueOf("\x80\x02\x8a\x00."s), 0);
  EXPECT_EQ(valueOf("\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00."s),
            UINT64_MAX);
  EXPECT_EQ(valueOf("\x80\x02G\x3f\xe0\x00\x00\x00\x00\x00\x00."s), 0.5);
  // (0.5, [1, "x"], {"k": ()}) in protocol 4.
  EXPECT_EQ(valueOf("\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00"
                    "G\x3f\xe0\x00\x00\x00\x00\x00\x00]\x94(K\x01\x8c\x01x\x94"
                    "e}\x94\x8c\x01k\x94)s\x87\x94."s),
            json::parse(R"([0.5, [1, "x"], {"k": []}])"));
  // b"\x00\xff" in protocol 2.
  EXPECT_EQ(valueOf("\x80\x02"
                    "c_codecs\nencode\nq\x00X\x03\x00\x00\x00\x00\xc3\xbfq\x01"
                    "X\x06\x00\x00\x00latin1q\x02\x86q\x03Rq\x04."s),
            json::binary({0, 255}));
  EXPECT_EQ(valueOf("\x80\x02"
                    "c__builtin__\nbytes\nq\x00)Rq\x01."s),
            json::binary({}));
}

TEST(Pickle, WritesWhatItReads) {
  json value = {{"none", nullptr},
                {"bool", {true, false}},
                {"ints", {0, 255, 256, -1, INT64_MIN, INT64_MAX, UINT64_MAX}},
                {"floats", {0.1, -0.0, 1e300}},
                {"text", {"", "é", std::string(300, 'x'), "é"}},
                {"bytes", json::binary({0, 127, 128, 255})},
                {"nested", {json::array(), json::object(), {{"a", {1}}}}}};
  for (bool tuples : {false, true}) {
    PickleWriter writer;
    writer.value(value, tuples);
    EXPECT_EQ(valueOf(std::move(writer).finish()), value);
  }
}

TEST(Pickle, WritesMoreThan256Texts) {
  json value = json::array();
  for (int i = 0; i < 1000; ++i)
    value.push_back("text " + std::to_string(i % 400));
  PickleWriter writer;
  writer.value(value, false);
  EXPECT_EQ(valueOf(std::move(writer).finish()), value);
}

TEST(Pickle, NamesAndCallsNothing) {
  EXPECT_THAT(errorOf("\x80\x02"
                      "cos\nsystem\nX\x02\x00\x00\x00ls\x85R."s),
              HasSubstr("a class or function that is not expected here: \"os "
                        "system\""));
  EXPECT_THAT(errorOf("\x80\x04\x8c\x02os\x8c\x06system\x93."s),
              HasSubstr("not expected here: \"os system\""));
  // Known, and still only a record of a call.
  EXPECT_THAT(errorOf("\x80\x02"
                      "ca\nB\n)R."s),
              HasSubstr("expected _codecs encode, got a B"));
  // Instructions that call or import: INST, OBJ, NEWOBJ_EX, EXT1, PERSID,
  // BUILD of what is no object, REDUCE of what is no name.
  for (const char *code : {"(ios\nsystem\n.", "(o.", ")}\x92.", "\x82\x01.",
                           "Pid\n.", "}}b.", "X\x01\x00\x00\x00x)R."})
    EXPECT_THAT(errorOf("\x80\x02"s + code), HasSubstr("file: byte ")) << code;
}

TEST(Pickle, RefusesWhatIsNone) {
  EXPECT_THAT(errorOf(""), HasSubstr("expected 1 more bytes"));
  EXPECT_THAT(errorOf("N."), HasSubstr("begins with its protocol"));
  EXPECT_THAT(errorOf("\x80\x01N."), HasSubstr("protocol 2 to 5, got 1"));
  EXPECT_THAT(errorOf("\x80\x06N."), HasSubstr("protocol 2 to 5, got 6"));
  EXPECT_THAT(errorOf("\x80\x02."), HasSubstr("expected one object"));
  EXPECT_THAT(errorOf("\x80\x02NN."), HasSubstr("expected one object"));
  EXPECT_THAT(errorOf("\x80\x02(N."), HasSubstr("expected one object"));
  EXPECT_THAT(errorOf("\x80\x02t."), HasSubstr("expected a mark"));
  EXPECT_THAT(errorOf("\x80\x02N\x86."), HasSubstr("expected 2 objects"));
  EXPECT_THAT(errorOf("\x80\x02N(\x85."), HasSubstr("expected 1 objects"));
  EXPECT_THAT(errorOf("\x80\x02Na."), HasSubstr("expected an object"));
  EXPECT_THAT(errorOf("\x80\x02NNa."), HasSubstr("expected a list"));
  EXPECT_THAT(errorOf("\x80\x02}(Nu."), HasSubstr("keys and values in turn"));
  EXPECT_THAT(errorOf("\x80\x02h\x00."s), HasSubstr("one of 0 memos"));
  EXPECT_THAT(errorOf("\x80\x02Nr\xff\xff\xff\x7f."s),
              HasSubstr("expected memo 0, got 2147483647"));
  EXPECT_THAT(errorOf("\x80\x02X\xff\xff\xff\xff."),
              HasSubstr("expected 4294967295 more bytes"));
  EXPECT_THAT(errorOf("\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN."),
              HasSubstr("expected a frame of"));
  EXPECT_THAT(errorOf("\x80\x02X\x01\x00\x00\x00\xff."s),
              HasSubstr("expected a text in"));
  EXPECT_THAT(errorOf("\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\x01."s),
              HasSubstr("64 bits"));
  // {1: None} and {"a": 1, "a": 1}
  EXPECT_THAT(errorOf("\x80\x02}K\x01Ns."), HasSubstr("expected a str"));
  EXPECT_THAT(errorOf("\x80\x04}(\x8c\x01\x61K\x01\x8c\x01\x61K\x01u."),
              HasSubstr("\"a\" appears twice"));
}

TEST(Pickle, EndsWhereItEnds) { EXPECT_EQ(read("\x80\x02N.rest").size(), 4u); }

TEST(Pickle, RefusesToGrowWithoutEnd) {
  // A list in itself.
  EXPECT_THAT(errorOf("\x80\x02]q\x00h\x00"s + "a."),
              HasSubstr("at most 64 levels"));
  // Nested deeply.
  EXPECT_THAT(errorOf("\x80\x02"s + std::string(100'000, '(') +
                      std::string(100'000, 't') + "."),
              HasSubstr("at most 64 levels"));
  // Tuples of twice the one before: 2^60 of them.
  std::string doubling = "\x80\x02()\x94"s;
  for (char i = 0; i < 60; ++i)
    doubling += "h"s + i + "h"s + i + "\x86\x94";
  EXPECT_THAT(errorOf(doubling + "t."),
              HasSubstr("it describes far more data than it has bytes"));
  // More objects than memory.
  EXPECT_THAT(errorOf("\x80\x02("s + std::string(3 << 20, 'N') + "t."),
              HasSubstr("it has implausibly many objects"));
}

TEST(Pickle, RefusesEveryTruncation) {
  PickleWriter writer;
  writer.value({{"a", {1, 2.0, "b", nullptr}}}, true);
  std::string whole = std::move(writer).finish();
  for (size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(errorOf(whole.substr(0, size)), "no error") << size;
}

} // namespace
} // namespace fsdp::test
