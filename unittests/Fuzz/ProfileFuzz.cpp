//===- ProfileFuzz.cpp - the reader of profiles ---------------------------===//
#include "Fuzz.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Plan/Profile.h"

using namespace fsdp;

/// What is accepted is written and read again as the same profile.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  std::string_view text(reinterpret_cast<const char *>(data), size);
  plan::Profile profile;
  try {
    profile = plan::parseProfile(text, "profile.json");
  } catch (const plan::PlanError &error) {
    fuzz::requireMessage(error.what(), "profile.json: ");
    return 0;
  }
  std::string printed = plan::printProfile(profile);
  fuzz::require(plan::printProfile(plan::parseProfile(printed, "printed")) ==
                    printed,
                "expected the same profile when it is read again");
  return 0;
}
