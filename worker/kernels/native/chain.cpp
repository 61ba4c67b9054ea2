// Calls of native functions one behind the other. Between two of them there is nothing: no interpreter, whose own data
// the weights of a model drive out of the caches, and no lock that another thread of it may hold.

#include <cstdint>

namespace octavo {

// In step with native_chain.py. A function returns 0, or what went wrong.
struct Call {
  int (*function)(const void* arguments);
  const void* arguments;
};

struct Chain {
  const Call* calls;
  int64_t count;
};

}  // namespace octavo

// How many calls went well: all, or those before the first that did not.
extern "C" __attribute__((visibility("default"))) int octavo_run_chain(const octavo::Chain* chain) {
  int64_t done = 0;
  while (done < chain->count && chain->calls[done].function(chain->calls[done].arguments) == 0) done++;
  return static_cast<int>(done);
}
