//===- ProcessIdentity.cpp - which process, on which host -----------------===//
#include "fsdp/Runtime/Collectives/ProcessIdentity.h"

#include <filesystem>
#include <fstream>
#include <sstream>

namespace fsdp::runtime {

std::string hostIdentity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::error_code none;
  return boot + " " +
         std::filesystem::read_symlink("/proc/self/ns/pid", none).string();
}

std::string processIdentity(pid_t pid) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), stat);
  // The 22nd field is when it began; the second may have blanks.
  std::istringstream fields(stat.substr(stat.rfind(')') + 1));
  std::string began;
  for (int field = 3; field <= 22; ++field)
    fields >> began;
  return hostIdentity() + " " + std::to_string(pid) + " " + began;
}

} // namespace fsdp::runtime
