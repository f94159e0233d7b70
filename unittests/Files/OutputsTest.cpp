//===- OutputsTest.cpp - where programs write -----------------------------===//
#include "fsdp/Support/Outputs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::test {
namespace {

namespace fs = std::filesystem;

class Outputs : public testing::Test {
protected:
  Outputs() {
    std::string name = testing::TempDir() + "fsdp-outputs-XXXXXX";
    dir = mkdtemp(name.data());
    for (const char *file : {"plan", "data"})
      EXPECT_EQ(writeFile(path(file), "old"), "");
    fs::create_hard_link(path("plan"), path("hard"));
    fs::create_symlink("plan", path("link"));
  }
  ~Outputs() override { fs::remove_all(dir); }

  std::string path(const std::string &name) const { return dir / name; }
  /// Of two outputs, beside an input.
  std::string errorOf(const std::string &a, const std::string &b) const {
    return checkOutputs({{"-a", a}, {"-b", b}},
                        {{"--data", path("data")}, {"the plan", path("plan")}});
  }

  fs::path dir;
};

TEST_F(Outputs, AreNoInputs) {
  EXPECT_EQ(errorOf(path("new"), path("other")), "");
  for (const char *name : {"plan", "./plan", "hard", "link"}) {
    EXPECT_EQ(errorOf(path("new"), path(name)),
              "-b and the plan: expected two files, got one: " + path(name));
    EXPECT_EQ(errorOf(path(name), path("new")),
              "-a and the plan: expected two files, got one: " + path(name));
  }
  EXPECT_EQ(errorOf(path("data"), path("new")),
            "-a and --data: expected two files, got one: " + path("data"));
}

TEST_F(Outputs, AreDifferent) {
  fs::create_directory(path("folder"));
  ASSERT_EQ(writeFile(path("old"), ""), "");
  for (const char *name : {"new", "old"})
    for (const char *same : {"./", "folder/../"})
      EXPECT_EQ(errorOf(path(name), path(same + std::string(name))),
                "-a and -b: expected two files, got one: " + path(name));
  fs::current_path(dir);
  EXPECT_EQ(errorOf("new", "./new"),
            "-a and -b: expected two files, got one: new");
  fs::current_path("/");
  // What is written there goes on.
  EXPECT_EQ(errorOf("/dev/null", "/dev/null"), "");
}

TEST_F(Outputs, APipeNeedsAReader) {
  std::string pipe = path("pipe"), error;
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(openForWriting(pipe, O_CREAT, error, /*waitSeconds=*/0), -1);
  EXPECT_EQ(error, "a pipe that nobody reads");
  int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  int writer = openForWriting(pipe, O_CREAT, error, /*waitSeconds=*/0);
  ASSERT_GE(writer, 0);
  EXPECT_EQ(fcntl(writer, F_GETFL) & O_NONBLOCK, 0);
  close(writer);
  close(reader);
  EXPECT_EQ(openForWriting(path("none/f"), O_CREAT, error), -1);
  EXPECT_EQ(error, "No such file or directory");
}

TEST_F(Outputs, DoNotGetTheNumbersOfStandardStreams) {
  pid_t child = fork();
  if (child == 0) {
    for (int stream : {0, 1, 2})
      close(stream);
    reserveStandardStreams();
    char byte = 0;
    bool fail = write(1, "x", 1) < 0 && errno == EBADF &&
                write(2, "x", 1) < 0 && errno == EBADF &&
                read(0, &byte, 1) < 0 && errno == EBADF;
    _exit(fail && open(path("plan").c_str(), O_RDONLY) > 2 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

} // namespace
} // namespace fsdp::test
