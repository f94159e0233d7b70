//===- MessageTest.cpp - lines for people ---------------------------------===//
#include "fsdp/Support/Message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

TEST(MessageTest, KeepsText) {
  std::string text = "plan.json: expected \"größe\", got 数 and 🙂";
  EXPECT_EQ(oneLine(text), text);
}

TEST(MessageTest, EscapesWhatSteersATerminal) {
  EXPECT_EQ(oneLine("a\x1b[31mb\n\tc\x7f"), "a\\x1b[31mb\\x0a\\x09c\\x7f");
  EXPECT_EQ(oneLine(std::string_view("a\0b", 3)), "a\\x00b");
  // CSI as one character, a line separator, text from right to left.
  EXPECT_EQ(oneLine("\xc2\x9b"), "\\xc2\\x9b");
  EXPECT_EQ(oneLine("\xe2\x80\xa8"), "\\xe2\\x80\\xa8");
  EXPECT_EQ(oneLine("\xe2\x80\xae"), "\\xe2\\x80\\xae");
}

TEST(MessageTest, EscapesWhatIsNotUtf8) {
  EXPECT_EQ(oneLine("a\xff"), "a\\xff");
  EXPECT_EQ(oneLine("\xc3"), "\\xc3");
  EXPECT_EQ(oneLine("\xc0\xaf"), "\\xc0\\xaf");
  EXPECT_EQ(oneLine("\xed\xa0\x80"), "\\xed\\xa0\\x80");
  EXPECT_EQ(oneLine("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(oneLine("\xe6\x95x"), "\\xe6\\x95x");
}

TEST(MessageTest, LeavesOutTheMiddleOfALongLine) {
  std::string line =
      oneLine("plan.json: " + std::string(60000, 'a') + ": expected 1, got 2");
  EXPECT_LT(line.size(), kMaxMessageBytes);
  EXPECT_THAT(line, StartsWith("plan.json: aaa"));
  EXPECT_THAT(line, EndsWith("aaa: expected 1, got 2"));
  EXPECT_THAT(line, HasSubstr("... (59130 bytes) ..."));
}

TEST(MessageTest, CutsBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 1000; ++i)
    text += "数";
  for (const char *prefix : {"", "a", "ab"})
    EXPECT_TRUE(isUtf8(oneLine(prefix + text))) << prefix;
}

TEST(MessageTest, KnowsUtf8) {
  EXPECT_TRUE(isUtf8(""));
  EXPECT_TRUE(isUtf8("größe \xf0\x9f\x99\x82"));
  for (const char *text : {"\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xbf\xbf",
                           "\xf0\x8f\xbf\xbf", "\xf5\x80\x80\x80", "\xe6\x95"})
    EXPECT_FALSE(isUtf8(text)) << oneLine(text);
}

} // namespace
} // namespace fsdp::test
