package org.apache.kafka.storage.internals.log;

import java.io.IOException;
import java.util.Optional;

/** Of this project, in Kafka's package only to reach what its cleaner keeps to that package. */
public final class CleanerInternals {
    private CleanerInternals() { }

    /** From where to where Kafka would clean, and whether it would overwrite the checkpoint it was given. */
    public record Range(long firstDirtyOffset, long firstUncleanableOffset, boolean checkpointReset) { }

    public static Range range(UnifiedLog log, Optional<Long> checkpoint, long nowMs) throws IOException {
        LogCleanerManager.OffsetsToClean found = LogCleanerManager.cleanableOffsets(log, checkpoint, nowMs);
        return new Range(found.firstDirtyOffset(), found.firstUncleanableDirtyOffset(), found.forceUpdateCheckpoint());
    }

    public static long mapBytesRead(CleanerStats stats) {
        return stats.mapBytesRead;
    }
}
