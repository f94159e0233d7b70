//===- NoisyPlugin.cpp - a plug-in that shows when it runs ----------------===//
//
// Of a version that no runtime has. Its constructor, which runs when the
// library is loaded, makes the file that FSDP_TEST_LOADED names.
//
//===----------------------------------------------------------------------===//
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" {
extern const int64_t fsdpOptimizerPluginVersion;
const int64_t fsdpOptimizerPluginVersion = 99;
void *fsdpCreateOptimizerPlugin(const void *) { return nullptr; }
}

__attribute__((constructor)) static void show() {
  if (const char *path = std::getenv("FSDP_TEST_LOADED"))
    if (std::FILE *file = std::fopen(path, "w"))
      std::fclose(file);
}
