//===- RankEnvironmentTest.cpp - what launchers say to ranks --------------===//
#include "fsdp/Runtime/Launch/RankEnvironment.h"
#include "fsdp/Runtime/Error.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <map>

using namespace fsdp::runtime;
using testing::HasSubstr;

namespace fsdp::test {
namespace {

constexpr const char *kNames[] = {"RANK",
                                  "WORLD_SIZE",
                                  "LOCAL_RANK",
                                  "MASTER_ADDR",
                                  "MASTER_PORT",
                                  "TORCHELASTIC_RUN_ID",
                                  "OMPI_COMM_WORLD_RANK",
                                  "OMPI_COMM_WORLD_SIZE",
                                  "OMPI_COMM_WORLD_LOCAL_RANK",
                                  "OMPI_COMM_WORLD_LOCAL_SIZE",
                                  "PMI_RANK",
                                  "PMI_SIZE",
                                  "PMI_JOBID",
                                  "PMIX_NAMESPACE",
                                  "MPI_LOCALRANKID",
                                  "MPI_LOCALNRANKS",
                                  "SLURM_PROCID",
                                  "SLURM_NTASKS",
                                  "SLURM_LOCALID",
                                  "SLURM_STEP_ID",
                                  "SLURM_JOB_ID",
                                  "SLURM_NNODES",
                                  "SLURM_STEP_NUM_NODES",
                                  "SLURM_STEP_NODELIST",
                                  "SLURM_JOB_NODELIST",
                                  "SLURM_NODELIST"};

using Variables = std::map<std::string, std::string>;

/// What the launchers' variables were before, which the end of its life sets
/// again: programs that other tests start inherit them.
class Restored {
public:
  Restored() {
    for (const char *name : kNames)
      if (const char *value = std::getenv(name))
        before[name] = value;
  }
  Restored(const Restored &) = delete;
  Restored &operator=(const Restored &) = delete;
  ~Restored() { set(before); }

  static void set(const Variables &variables) {
    for (const char *name : kNames)
      unsetenv(name);
    for (const auto &[name, value] : variables)
      setenv(name.c_str(), value.c_str(), 1);
  }

private:
  Variables before;
};

/// rankEnvironment() where of the launchers' variables these alone are set.
std::optional<RankEnvironment> read(const Variables &variables) {
  Restored restored;
  Restored::set(variables);
  return rankEnvironment();
}

std::string errorOf(const Variables &variables) {
  try {
    read(variables);
  } catch (const InputError &error) {
    return error.what();
  }
  return "";
}

const Variables kSlurm = {{"SLURM_JOB_ID", "7"},
                          {"SLURM_STEP_ID", "2"},
                          {"SLURM_PROCID", "5"},
                          {"SLURM_NTASKS", "8"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NNODES", "4"},
                          {"SLURM_STEP_NODELIST", "gpu[08-09,11],x1"}};

Variables with(Variables variables, const Variables &more) {
  for (const auto &[name, value] : more)
    variables[name] = value;
  return variables;
}

TEST(RankEnvironment, IsNoneWithoutALauncher) {
  EXPECT_FALSE(read({}));
  // A batch script has a rank, and starts no step.
  Variables batch = kSlurm;
  batch.erase("SLURM_STEP_ID");
  EXPECT_FALSE(read(batch));
}

TEST(RankEnvironment, OfSlurm) {
  std::optional<RankEnvironment> found = read(kSlurm);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 5);
  EXPECT_EQ(found->worldSize, 8);
  EXPECT_EQ(found->localRank, 1);
  EXPECT_EQ(found->masterAddress, "gpu08");
  EXPECT_GE(found->masterPort, 20000);
  EXPECT_LT(found->masterPort, 30000);
  // All ranks of a step have one port, and two steps hardly have the same.
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_PROCID", "0"}}))->masterPort,
            found->masterPort);
  EXPECT_NE(read(with(kSlurm, {{"SLURM_STEP_ID", "3"}}))->masterPort,
            found->masterPort);
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_NNODES", "1"}}))->masterAddress,
            "127.0.0.1");
  EXPECT_EQ(read(with(kSlurm, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "9"}}))
                ->masterPort,
            9);
}

TEST(RankEnvironment, TheInnermostLauncherCounts) {
  Variables torchrun = {{"RANK", "3"},
                        {"WORLD_SIZE", "4"},
                        {"MASTER_ADDR", "h"},
                        {"MASTER_PORT", "1"},
                        {"TORCHELASTIC_RUN_ID", "x"}};
  EXPECT_EQ(read(with(kSlurm, torchrun))->rank, 3);
  Variables mpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                   {"OMPI_COMM_WORLD_SIZE", "2"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(read(with(kSlurm, mpi))->rank, 1);
  EXPECT_EQ(read(mpi)->masterAddress, "127.0.0.1");
  torchrun.erase("TORCHELASTIC_RUN_ID");
  EXPECT_EQ(errorOf(with(kSlurm, torchrun)),
            "RANK=3 and SLURM_PROCID=5: expected equal ranks, or only one "
            "of them to be set");
  EXPECT_THAT(errorOf(with(mpi, {{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}})),
              HasSubstr("OMPI_COMM_WORLD_SIZE=2 and PMI_SIZE=3"));
}

TEST(RankEnvironment, RefusesWhatIsIncomplete) {
  EXPECT_THAT(errorOf({{"PMI_RANK", "0"}}),
              HasSubstr("PMI_RANK is set but PMI_SIZE is not"));
  EXPECT_THAT(errorOf({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}),
              HasSubstr("PMI_RANK is set but MASTER_ADDR is not"));
  EXPECT_THAT(errorOf({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}),
              HasSubstr("PMI_RANK: expected a rank below PMI_SIZE=2, got 2"));
  EXPECT_THAT(errorOf(with(kSlurm, {{"SLURM_NTASKS", "8(x2)"}})),
              HasSubstr("SLURM_NTASKS: expected a number"));
  for (const char *port : {"0", "65536", "70000", "x"})
    EXPECT_EQ(
        errorOf(with(kSlurm, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", port}})),
        "MASTER_PORT: expected a number from 1 to 65535, got \"" +
            std::string(port) + "\"");
}

TEST(RankEnvironment, FirstHostOfAList) {
  EXPECT_EQ(firstHost("a"), "a");
  EXPECT_EQ(firstHost("a,b[1-2]"), "a");
  EXPECT_EQ(firstHost("gpu[03-05,07],login1"), "gpu03");
  EXPECT_EQ(firstHost("gpu[7,9]"), "gpu7");
  EXPECT_EQ(firstHost("r[1-2]-ib"), "r1-ib");
  EXPECT_EQ(firstHost("r[1-2]n[1-4]"), "");
  EXPECT_EQ(firstHost("r[1-2"), "");
  EXPECT_EQ(firstHost(""), "");
}

} // namespace
} // namespace fsdp::test
