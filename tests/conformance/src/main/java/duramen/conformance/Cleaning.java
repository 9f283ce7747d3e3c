package duramen.conformance;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerInternals;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogCleanerManager;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.PreCleanStats;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;

import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.security.GeneralSecurityException;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;

/** Kafka's own cleaner over one partition directory: a single pass, or only what Kafka says about whether one is due. */
final class Cleaning {
    private Cleaning() { }

    static ObjectNode clean(JsonNode request) throws IOException, GeneralSecurityException {
        try (Log log = new Log(request)) {
            UnifiedLog unified = log.unified();
            if (request.path("roll").asBoolean()) log.rollAndSettle();
            CleanerInternals.Range range = CleanerInternals.range(unified, checkpoint(request), log.time().milliseconds());
            LogToClean target = new LogToClean(unified, range.firstDirtyOffset(), range.firstUncleanableOffset(), false);
            ObjectNode answer = describe(range, target);
            answer.put("end_offset", range.firstDirtyOffset()).put("cleaned", false);
            // Kafka never cleans a log that has nothing to clean.
            if (target.cleanableBytes() > 0) pass(request, log, target, answer);
            answer.set("state", log.state());
            return answer;
        }
    }

    private static void pass(JsonNode request, Log log, LogToClean target, ObjectNode answer) throws IOException, GeneralSecurityException {
        SkimpyOffsetMap map = new SkimpyOffsetMap((int) Driver.number(request, "dedupe_buffer_bytes", 1 << 20));
        // An assertion of Kafka's that is off by default; without it a pass over an empty map would end at offset 0.
        double loadFactor = request.path("load_factor").asDouble(0.9);
        if ((int) (map.slots() * loadFactor) < 1) throw new Driver.BadRequest("the dedupe buffer has no room for one key");
        Cleaner cleaner = new Cleaner(0, map, (int) Driver.number(request, "io_buffer_bytes", 256 << 10),
            (int) Driver.number(request, "io_buffer_bytes_max", 1 << 20), loadFactor,
            new Throttler(Double.MAX_VALUE, 300, "conformance-io", "bytes", log.time()), log.time(), partition -> { });
        long began = System.nanoTime();
        Map.Entry<Long, CleanerStats> result = cleaner.clean(target);
        long nanos = System.nanoTime() - began;
        CleanerStats stats = result.getValue();
        answer.put("end_offset", result.getKey()).put("cleaned", true);
        answer.putObject("stats").put("map_entries", map.size()).put("map_slots", map.slots())
            .put("map_bytes_read", CleanerInternals.mapBytesRead(stats)).put("map_messages_read", stats.mapMessagesRead())
            .put("bytes_read", stats.bytesRead()).put("bytes_written", stats.bytesWritten())
            .put("messages_read", stats.messagesRead()).put("messages_written", stats.messagesWritten())
            .put("invalid_messages_read", stats.invalidMessagesRead()).put("nanos", nanos);
    }

    static ObjectNode cleanable(JsonNode request) throws IOException {
        try (Log log = new Log(request)) {
            if (request.path("roll").asBoolean()) log.rollAndSettle();
            ArrayNode answers = Driver.object().putArray("answers");
            for (JsonNode question : request.path("questions")) answers.add(verdict(question, log));
            return Driver.object().set("answers", answers);
        }
    }

    /** The manager that chooses what a broker's cleaner threads do next, with this log as its only one. */
    private static ObjectNode verdict(JsonNode question, Log log) throws IOException {
        log.set(question);
        UnifiedLog unified = log.unified();
        Optional<Long> checkpoint = checkpoint(question);
        CleanerInternals.Range range = CleanerInternals.range(unified, checkpoint, log.time().milliseconds());
        ObjectNode answer = describe(range, new LogToClean(unified, range.firstDirtyOffset(), range.firstUncleanableOffset(), false));
        TopicPartition partition = unified.topicPartition();
        File parent = unified.parentDirFile();
        ConcurrentMap<TopicPartition, UnifiedLog> logs = new ConcurrentHashMap<>(Map.of(partition, unified));
        LogCleanerManager manager = new LogCleanerManager(List.of(parent), logs, new LogDirFailureChannel(1));
        try {
            if (checkpoint.isPresent())
                manager.updateCheckpoints(parent, Optional.of(Map.entry(partition, checkpoint.get())), Optional.empty());
            PreCleanStats stats = new PreCleanStats();
            Optional<LogToClean> chosen = manager.grabFilthiestCompactedLog(log.time(), stats);
            answer.put("eligible", chosen.isPresent()).put("must_clean", stats.maxCompactionDelayMs() > 0)
                .put("compaction_delay_ms", stats.maxCompactionDelayMs())
                .put("checkpoint", manager.allCleanerCheckpoints().get(partition));
            return answer;
        } finally {
            manager.removeMetrics();
            Files.deleteIfExists(new File(parent, LogCleanerManager.OFFSET_CHECKPOINT_FILE).toPath());
        }
    }

    private static Optional<Long> checkpoint(JsonNode request) {
        return request.hasNonNull("checkpoint") ? Optional.of(request.get("checkpoint").asLong()) : Optional.empty();
    }

    private static ObjectNode describe(CleanerInternals.Range range, LogToClean target) {
        return Driver.object().put("first_dirty_offset", range.firstDirtyOffset())
            .put("first_uncleanable_offset", target.firstUncleanableOffset()).put("checkpoint_reset", range.checkpointReset())
            .put("clean_bytes", target.cleanBytes()).put("cleanable_bytes", target.cleanableBytes())
            .put("cleanable_ratio", target.cleanableRatio());
    }
}
