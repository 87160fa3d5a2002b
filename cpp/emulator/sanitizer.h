#pragma once

// What the runtime tells the sanitizers. The runtime itself is never instrumented (only kernels are), so it says
// explicitly what a fiber switch, a barrier and a copy mean. The functions are weak: one build of the runtime serves
// plain, ASan and TSan programs.

#include <cstddef>

extern "C"
{
    __attribute__((weak)) void __sanitizer_start_switch_fiber(void** fakeStack, void const* bottom, std::size_t bytes);
    __attribute__((weak)) void __sanitizer_finish_switch_fiber(
        void* fakeStack, void const** bottom, std::size_t* bytes);
    __attribute__((weak)) void __asan_poison_memory_region(void const volatile* address, std::size_t bytes);
    __attribute__((weak)) void __asan_unpoison_memory_region(void const volatile* address, std::size_t bytes);
    __attribute__((weak)) void __asan_loadN(void const* address, std::size_t bytes);
    __attribute__((weak)) void __asan_storeN(void* address, std::size_t bytes);

    __attribute__((weak)) void AnnotateIgnoreReadsBegin(char const* file, int line);
    __attribute__((weak)) void AnnotateIgnoreReadsEnd(char const* file, int line);
    __attribute__((weak)) void AnnotateIgnoreWritesBegin(char const* file, int line);
    __attribute__((weak)) void AnnotateIgnoreWritesEnd(char const* file, int line);
    __attribute__((weak)) void* __tsan_get_current_fiber();
    __attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
    __attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
    __attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
    __attribute__((weak)) void __tsan_acquire(void* address);
    __attribute__((weak)) void __tsan_release(void* address);
    __attribute__((weak)) void __tsan_read_range(void* address, std::size_t bytes);
    __attribute__((weak)) void __tsan_write_range(void* address, std::size_t bytes);
}

namespace trtllm_kvmap::emulator
{

inline bool underAsan()
{
    return __asan_poison_memory_region != nullptr;
}

inline bool underTsan()
{
    return __tsan_switch_to_fiber != nullptr;
}

//! The current fiber reads (writes) memory on behalf of its kernel, in code that no sanitizer sees.
inline void noteRead(void const* address, std::size_t bytes)
{
    if (__asan_loadN != nullptr)
    {
        __asan_loadN(address, bytes);
    }
    if (__tsan_read_range != nullptr)
    {
        __tsan_read_range(const_cast<void*>(address), bytes);
    }
}

inline void noteWrite(void* address, std::size_t bytes)
{
    if (__asan_storeN != nullptr)
    {
        __asan_storeN(address, bytes);
    }
    if (__tsan_write_range != nullptr)
    {
        __tsan_write_range(address, bytes);
    }
}

//! Everything before a release of \p token happens before what follows an acquire of it.
inline void releaseOrder(void* token)
{
    if (__tsan_release != nullptr)
    {
        __tsan_release(token);
    }
}

inline void acquireOrder(void* token)
{
    if (__tsan_acquire != nullptr)
    {
        __tsan_acquire(token);
    }
}

//! While it lives, what the runtime does for many threads (through memcpy or the heap, which TSan watches even here) is
//! not held against the one thread that happens to do it.
class UnseenByTsan
{
public:
    UnseenByTsan()
    {
        if (underTsan())
        {
            AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
            AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
        }
    }

    ~UnseenByTsan()
    {
        if (underTsan())
        {
            AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
            AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        }
    }

    UnseenByTsan(UnseenByTsan const&) = delete;
    UnseenByTsan& operator=(UnseenByTsan const&) = delete;
};

} // namespace trtllm_kvmap::emulator
