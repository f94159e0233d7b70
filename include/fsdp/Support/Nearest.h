//===- Nearest.h - what somebody may have meant ---------------------------===//
#ifndef FSDP_SUPPORT_NEAREST_H
#define FSDP_SUPPORT_NEAREST_H

#include "llvm/ADT/ArrayRef.h"
#include "llvm/ADT/StringExtras.h"

#include <string>

namespace fsdp {

/// The candidate nearest to `text`, as ", did you mean \"…\"?", or all
/// candidates if none is near: the end of an error about an unknown name.
inline std::string nearest(llvm::StringRef text,
                           llvm::ArrayRef<llvm::StringRef> known) {
  llvm::StringRef best;
  unsigned bestDistance = 4;
  for (llvm::StringRef candidate : known)
    if (unsigned distance = text.edit_distance(candidate);
        distance < bestDistance) {
      bestDistance = distance;
      best = candidate;
    }
  if (best.empty())
    return "; known ones are: " + llvm::join(known, ", ");
  return ", did you mean \"" + best.str() + "\"?";
}

} // namespace fsdp

#endif // FSDP_SUPPORT_NEAREST_H
