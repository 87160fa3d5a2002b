// Which tokens of which sequence a call maps.
#pragma once

#include <trtllm_kvmap/mapKvCache.h>

namespace trtllm_kvmap::plugin
{

// First position and count of the tokens of each sequence, host memory [numSequences, 2]. The tokens of a call are those
// of the first sequence, then those of the second, and so on.
struct SequenceSpans
{
    int32_t const* firstAndCount;
    int32_t numSequences;

    int32_t first(int32_t sequence) const
    {
        return firstAndCount[2 * sequence];
    }

    int32_t count(int32_t sequence) const
    {
        return firstAndCount[2 * sequence + 1];
    }
};

// Refuses spans that are negative, reach past `numPositions`, or add up to more than `maxNumTokens`; counts them.
Status checkSpans(SequenceSpans const& spans, int64_t numPositions, int64_t maxNumTokens, int64_t* numTokens);

} // namespace trtllm_kvmap::plugin
