//===- OpenPlanTest.cpp - which plug-in of a plan may run -----------------===//
#include "fsdp/Runtime/Execution/OpenPlan.h"
#include "Support/Fixtures.h"
#include "Support/SamplePlan.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Optimizer/OptimizerPlugin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include <dlfcn.h>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::HasSubstr;

class OpenPlan : public testing::Test {
protected:
  void SetUp() override { setenv("FSDP_TEST_LOADED", loaded.c_str(), 1); }
  void TearDown() override { unsetenv("FSDP_TEST_LOADED"); }

  /// The path of a plan with that library.
  std::string planWith(const std::string &library) {
    plan::Plan plan = samplePlan(2);
    plan.optimizer.name = "plugin";
    plan.optimizer.library = library;
    plan.optimizer.options = {{"beta1", 0.9}};
    plan.paramGroups = {plan.optimizer};
    writeText(dir / "plan.json", plan::printPlan(plan));
    return dir / "plan.json";
  }

  std::string errorOf(const std::string &library, const std::string &allowed) {
    std::string path = planWith(library);
    try {
      openPlan(path, allowed);
    } catch (const InputError &error) {
      return error.what();
    }
    return "no error";
  }

  ScratchDir dir;
  std::string loaded = dir / "loaded";
};

TEST_F(OpenPlan, LibraryThatNobodyAllowsIsRefused) {
  std::filesystem::copy_file(LION_PATH, dir / "lion.so");
  EXPECT_THAT(errorOf("lion.so", ""),
              HasSubstr("plan.json: the optimizer is code in the library "
                        "\"lion.so\"; expected --allow-plugin"));
  EXPECT_THAT(errorOf("lion.so", LION_PATH),
              HasSubstr("expected --allow-plugin " + (dir / "lion.so")));
  EXPECT_THAT(errorOf("none.so", dir / "lion.so"), HasSubstr("none.so"));
  EXPECT_THAT(errorOf("lion.so", dir / "none.so"), HasSubstr("none.so"));
  writeText(dir / "plan.json", plan::printPlan(samplePlan(2)));
  EXPECT_THROW(openPlan(dir / "plan.json", dir / "lion.so"), InputError);
}

TEST_F(OpenPlan, FileCountsAndNotTheWayToIt) {
  std::filesystem::copy_file(LION_PATH, dir / "lion.so");
  std::filesystem::create_directory(dir / "sub");
  std::filesystem::create_symlink(dir / "lion.so", dir / "link.so");
  std::string file = std::filesystem::canonical(dir / "lion.so").string();
  for (const char *library : {"lion.so", "sub/../lion.so", "link.so"})
    for (const char *allowed : {"lion.so", "sub/../lion.so", "link.so"}) {
      plan::Plan plan = openPlan(planWith(library), dir / allowed);
      EXPECT_EQ(plan.optimizer.library, file);
      EXPECT_EQ(plan.paramGroups[0].library, file);
    }
  // Another file of the same bytes is another file.
  std::filesystem::copy_file(LION_PATH, dir / "sub/lion.so");
  EXPECT_THAT(errorOf("sub/lion.so", dir / "lion.so"),
              HasSubstr("expected --allow-plugin"));
}

TEST_F(OpenPlan, OtherVersionIsRefusedBeforeAnythingOfItRuns) {
  EXPECT_THAT(errorOf(NOISY_PLUGIN_PATH, NOISY_PLUGIN_PATH),
              HasSubstr("expected version 2 of the plug-in interface, got 99"));
  EXPECT_FALSE(std::filesystem::exists(loaded));
  // It would have shown.
  void *handle = dlopen(NOISY_PLUGIN_PATH, RTLD_NOW);
  EXPECT_TRUE(std::filesystem::exists(loaded));
  dlclose(handle);
}

TEST_F(OpenPlan, FileThatIsNoPluginIsRefused) {
  std::string message = "expected a shared library with FSDP_OPTIMIZER_PLUGIN";
  writeText(dir / "text.so", "no library");
  EXPECT_THAT(errorOf("text.so", dir / "text.so"), HasSubstr(message));
  EXPECT_THAT(errorOf(FSDP_RUN_PATH, FSDP_RUN_PATH), HasSubstr(message));
  // Every field of the format's tables may be anything.
  std::string bytes = readText(NOISY_PLUGIN_PATH);
  for (size_t at = 0; at < std::min<size_t>(bytes.size(), 512); ++at) {
    std::string cut = bytes;
    cut[at] = char(cut[at] ^ 0xff);
    writeText(dir / "cut.so", cut);
    EXPECT_THROW(checkOptimizerLibrary(dir / "cut.so"), InputError);
    writeText(dir / "cut.so", bytes.substr(0, at));
    EXPECT_THROW(checkOptimizerLibrary(dir / "cut.so"), InputError);
  }
}

} // namespace
} // namespace fsdp::test
