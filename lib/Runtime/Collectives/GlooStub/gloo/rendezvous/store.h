//===- store.h - see context.h --------------------------------------------===//
#ifndef FSDP_RUNTIME_GLOOSTUB_STORE_H
#define FSDP_RUNTIME_GLOOSTUB_STORE_H

#include <chrono>
#include <string>
#include <vector>

namespace gloo::rendezvous {

class Store {
public:
  virtual ~Store();
  virtual void set(const std::string &key, const std::vector<char> &data) = 0;
  virtual std::vector<char> get(const std::string &key) = 0;
  virtual void wait(const std::vector<std::string> &keys) = 0;
  virtual void wait(const std::vector<std::string> &keys,
                    const std::chrono::milliseconds &timeout) = 0;
};

} // namespace gloo::rendezvous

#endif // FSDP_RUNTIME_GLOOSTUB_STORE_H
