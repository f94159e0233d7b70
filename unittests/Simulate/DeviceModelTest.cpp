//===- DeviceModelTest.cpp - descriptions of devices, ring times ----------===//
#include "fsdp/Simulate/DeviceModel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

using namespace fsdp;
using namespace fsdp::simulate;
namespace fs = std::filesystem;
using testing::HasSubstr;

namespace {

constexpr const char *kDevice = R"(name: test
peak_flops: {float32: 100, bfloat16: 400}
memory_bandwidth: 1000
ranks_per_host: 8
collective_latency: 0.5
within_host: {latency: 0.25, bandwidth: 100}
between_hosts: {latency: 2, bandwidth: 10}
)";

DeviceModel device() { return parseDevice(kDevice, "device.yaml"); }

std::string errorOf(const std::string &yaml) {
  try {
    parseDevice(yaml, "device.yaml");
  } catch (const SimulateError &error) {
    return error.what();
  }
  return "";
}

std::string clusterError(const std::string &yaml,
                         const std::string &path = "cluster.yaml",
                         int64_t ranks = 16) {
  try {
    parseCluster(yaml, path, ranks);
  } catch (const SimulateError &error) {
    return error.what();
  }
  return "";
}

TEST(DeviceModel, ReadsADescription) {
  DeviceModel read = device();
  EXPECT_EQ(read.name, "test");
  EXPECT_EQ(read.peak(plan::DType::BFloat16), 400);
  EXPECT_EQ(read.peak(plan::DType::Float16), 100); // float32's
  EXPECT_EQ(read.memoryBandwidth, 1000);
  EXPECT_EQ(read.betweenHosts.latency, 2);
  EXPECT_EQ(read.collectiveSlowdown, 1);
  EXPECT_FALSE(read.sharedMemory);
}

TEST(DeviceModel, ShippedDescriptionsAreThere) {
  EXPECT_THAT(shippedDevices(), testing::ElementsAre("cpu", "h100"));
  EXPECT_TRUE(loadDevice("cpu").sharedMemory);
  EXPECT_EQ(loadDevice("h100").ranksPerHost, 8);
}

TEST(DeviceModel, NamesWhatIsWrong) {
  EXPECT_EQ(errorOf(std::string(kDevice) + "memory_bandwith: 3\n"),
            "device.yaml:8:1: unknown key \"memory_bandwith\" in a device, did "
            "you mean \"memory_bandwidth\"?");
  EXPECT_EQ(errorOf(std::string(kDevice) + "name: again\n"),
            "device.yaml:8:1: key \"name\" is given twice");
  EXPECT_EQ(errorOf(std::string(kDevice) + "matmul_fraction: 1.5\n"),
            "device.yaml:8:18: expected a number from 1e-6 to 1 for "
            "\"matmul_fraction\", got \"1.5\"");
  EXPECT_EQ(errorOf(std::string(kDevice) + "memory_fraction: 1e-300\n"),
            "device.yaml:8:18: expected a number from 1e-6 to 1 for "
            "\"memory_fraction\", got \"1e-300\"");
  EXPECT_EQ(errorOf(std::string(kDevice) + "op_overhead: 1e308\n"),
            "device.yaml:8:14: expected a number from 0 to 1e6 for "
            "\"op_overhead\", got \"1e308\"");
  EXPECT_EQ(errorOf(std::string(kDevice) + "memory_capacity: 1e300\n"),
            "device.yaml:8:18: expected a number from 1 to 1e18 for "
            "\"memory_capacity\", got \"1e300\"");
  EXPECT_EQ(errorOf(std::string(kDevice) + "collective_slowdown: nan\n"),
            "device.yaml:8:22: expected a number from 1 to 1e6 for "
            "\"collective_slowdown\", got \"nan\"");
  EXPECT_EQ(clusterError("device: h100\nranks_per_host: 9223372036854775807\n"),
            "cluster.yaml:2:17: expected an integer from 1 to 1099511627776 "
            "for \"ranks_per_host\", got \"9223372036854775807\"");
  EXPECT_EQ(errorOf(std::string(kDevice) + "shared_memory: 1\n"),
            "device.yaml:8:16: expected true or false for \"shared_memory\", "
            "got \"1\"");
  EXPECT_EQ(errorOf("name: x\nmemory_bandwidth: 1\n"),
            "device.yaml:1:1: missing key \"peak_flops\" in a device");
  EXPECT_EQ(errorOf("name: x\npeak_flops: {bfloat16: 1}\n"
                    "memory_bandwidth: 1\n"),
            "device.yaml:2:14: missing key \"float32\" in \"peak_flops\"");
  EXPECT_EQ(errorOf("name: x\npeak_flops: fast\nmemory_bandwidth: 1\n"),
            "device.yaml:2:13: expected a mapping for \"peak_flops\", got "
            "\"fast\"");
  EXPECT_THAT(errorOf("name: x\npeak_flops: {float32: 1}\n"
                      "memory_bandwidth: 1\nranks_per_host: 2\n"),
              HasSubstr("missing key \"within_host\""));
  EXPECT_THAT(errorOf("name: [1, 2]\n"),
              HasSubstr("device.yaml:1:8: expected a scalar or a mapping"));
  EXPECT_THAT(errorOf("name: {\n"), HasSubstr("device.yaml:"));
  EXPECT_EQ(errorOf("").substr(0, 47),
            "device.yaml:1:1: expected a mapping for a devic");
}

TEST(DeviceModel, TakesAllOfOneDocument) {
  std::string more = "expected one YAML document, got more behind its end";
  EXPECT_EQ(errorOf(std::string(kDevice) + "---\nname: again\n"),
            "device.yaml:9:1: " + more);
  EXPECT_EQ(clusterError("{device: h100}\nranks: 8\n"),
            "cluster.yaml:2:1: " + more);
  EXPECT_EQ(errorOf("%FOO\n---\n" + std::string(kDevice)),
            "device.yaml:1:1: expected no directive but %YAML and %TAG");
  EXPECT_EQ(clusterError("device: h100\noverride:\n\tname: x\n"),
            "cluster.yaml:3:1: expected spaces as indentation, got a tab");
  EXPECT_EQ(clusterError("device: &a h100\nranks: *a\n"),
            "cluster.yaml:1:9: expected a value without anchor and alias");
  EXPECT_EQ(clusterError("device: h100\noverride: {name: *a}\n"),
            "cluster.yaml:2:18: expected a value without anchor and alias");
  EXPECT_EQ(errorOf("---\n" + std::string(kDevice) + "...\n# the end\n"), "");
}

TEST(DeviceModel, UnknownDeviceNamesTheNearest) {
  try {
    loadDevice("h10");
    FAIL();
  } catch (const SimulateError &error) {
    EXPECT_STREQ(error.what(),
                 "unknown device \"h10\", did you mean \"h100\"? (or the path "
                 "of a .yaml file)");
  }
}

TEST(DeviceModel, RingInsideAHost) {
  // Seven hops; 7/8 of the bytes over the link.
  Transfer gather = transferTime(device(), Collective::AllGather, {8, 1}, 8000);
  EXPECT_DOUBLE_EQ(gather.seconds, 0.5 + 7 * 0.25 + 7000. / 100);
  EXPECT_EQ(gather.medium, Medium::WithinHost);
  Transfer reduce = transferTime(device(), Collective::AllReduce, {8, 1}, 8000);
  EXPECT_DOUBLE_EQ(reduce.seconds, 0.5 + 2 * (7 * 0.25 + 7000. / 100));
}

TEST(DeviceModel, RingBetweenHosts) {
  // Half of the bytes come into each host, over eight links: 8000 / 2 / 80.
  // Inside, 15/16 of 8000 at 100. The slower counts: 75 against 50.
  Transfer gather =
      transferTime(device(), Collective::AllGather, {16, 1}, 8000);
  EXPECT_DOUBLE_EQ(gather.seconds, 0.5 + 14 * 0.25 + 2 + 75);
  EXPECT_EQ(gather.medium, Medium::BetweenHosts);
  // Four replicas, one rank of each host: 3/4 of the bytes over its own link.
  Transfer reduce = transferTime(device(), Collective::AllReduce, {4, 8}, 100);
  EXPECT_DOUBLE_EQ(reduce.seconds, 0.5 + 2 * (3 * 2 + 75. / 10));
  // Two replicas of four ranks are on one host.
  EXPECT_EQ(transferTime(device(), Collective::AllReduce, {2, 4}, 100).medium,
            Medium::WithinHost);
  EXPECT_EQ(hostsOf(device(), {4, 4}), 2);
  EXPECT_EQ(transferTime(device(), Collective::AllGather, {1, 1}, 5).seconds,
            0);
}

TEST(DeviceModel, AllToAllSendsToAllAtOnce) {
  // One hop; 7/8 of a rank's bytes over its link.
  EXPECT_DOUBLE_EQ(
      transferTime(device(), Collective::AllToAll, {8, 1}, 8000).seconds,
      0.5 + 0.25 + 7000. / 100);
  // Of 16 ranks half are on another host, which its own link of 10 leads to.
  Transfer across = transferTime(device(), Collective::AllToAll, {16, 1}, 8000);
  EXPECT_DOUBLE_EQ(across.seconds, 0.5 + 2 + 4000. / 10);
  EXPECT_EQ(across.medium, Medium::BetweenHosts);
  // A send passes all bytes once.
  EXPECT_DOUBLE_EQ(
      transferTime(device(), Collective::SendReceive, {8, 1}, 8000).seconds,
      0.5 + 0.25 + 8000. / 100);
  EXPECT_DOUBLE_EQ(
      transferTime(device(), Collective::SendReceive, {2, 8}, 8000).seconds,
      0.5 + 2 + 8000. / 10);
}

TEST(DeviceModel, SharedMemory) {
  DeviceModel shared = device();
  shared.sharedMemory = true;
  EXPECT_DOUBLE_EQ(
      transferTime(shared, Collective::AllGather, {4, 1}, 8000).seconds, 0.5);
  // Reads the peers' quarters of its rows, writes its own.
  EXPECT_DOUBLE_EQ(
      transferTime(shared, Collective::ReduceScatter, {4, 1}, 8000).seconds,
      0.5 + 10000. / 1000);
}

TEST(DeviceModel, ReadsACluster) {
  std::string text = "device: h100\nranks: 16\nhosts: 2\n"
                     "override: {memory_bandwidth: 5, name: slow}\n";
  Cluster cluster = parseCluster(text, "cluster.yaml", 16);
  EXPECT_EQ(cluster.hosts, 2);
  EXPECT_EQ(cluster.device.memoryBandwidth, 5);
  EXPECT_EQ(cluster.device.name, "slow");
  EXPECT_EQ(clusterError("device: h100\nranks: 8\n"),
            "cluster.yaml:2:8: expected \"ranks\" to be the plan's world size "
            "16, got 8");
  EXPECT_EQ(clusterError("device: h100\nhosts: 1\n"),
            "cluster.yaml:2:8: expected \"hosts\" to be at least 2 for 16 "
            "ranks, 8 on each, got 1");
  EXPECT_EQ(clusterError("device: h100\nranks_per_host: 16\nhosts: 1\n"), "");
  EXPECT_THAT(clusterError("device: h200\n"),
              HasSubstr("cluster.yaml:1:9: unknown device \"h200\", did you "
                        "mean \"h100\"?"));
  EXPECT_THAT(clusterError("device: h100\noverride: {ranks: 1}\n"),
              HasSubstr("unknown key \"ranks\" in \"override\""));
  EXPECT_THAT(clusterError("device: cpu\nranks_per_host: 8\n"),
              HasSubstr("expected a device with \"between_hosts\""));
}

TEST(DeviceModel, AClustersDeviceIsBesideIt) {
  // Not in the working folder, whether there is such a file or not.
  fs::path folder = fs::path(testing::TempDir()) / "fsdp-cluster";
  fs::create_directories(folder / "sub");
  auto write = [&](const fs::path &name) {
    std::ofstream(folder / name) << kDevice << "collective_slowdown: 2\n";
  };
  auto load = [&](const std::string &name) {
    return clusterError("device: " + name + "\n",
                        (folder / "cluster.yaml").string(), 1);
  };
  write("sub/own.yaml");
  write("plain");
  EXPECT_EQ(load("sub/own.yaml"), "");
  EXPECT_EQ(load("plain"), "");
  EXPECT_EQ(load((folder / "plain").string()), "");
  fs::path before = fs::current_path();
  fs::current_path(folder / "sub");
  EXPECT_THAT(load("own.yaml"),
              HasSubstr((folder / "own.yaml").string() + ": cannot be read"));
  fs::current_path(before);
  fs::remove_all(folder);
}

} // namespace
