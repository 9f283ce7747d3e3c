package duramen.conformance;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.record.internal.FileRecords;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.RecordVersion;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.common.utils.Utils;
import org.apache.kafka.server.common.RequestLocal;
import org.apache.kafka.server.storage.log.FetchIsolation;
import org.apache.kafka.server.util.Scheduler;
import org.apache.kafka.storage.internals.log.AppendOrigin;
import org.apache.kafka.storage.internals.log.FetchDataInfo;
import org.apache.kafka.storage.internals.log.LogAppendInfo;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.LogStartOffsetIncrementReason;
import org.apache.kafka.storage.internals.log.ProducerStateEntry;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.log.VerificationGuard;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

import java.io.File;
import java.io.IOException;
import java.lang.reflect.Proxy;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Comparator;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.PriorityQueue;
import java.util.concurrent.ScheduledFuture;
import java.util.function.Supplier;

/** One partition directory opened with Kafka's UnifiedLog, and the operations a request asks of it. */
final class Log implements AutoCloseable {
    /** Milliseconds as the request sets them, so that two runs write the same bytes. */
    private static final class Clock implements Time {
        long nowMs;

        @Override
        public long milliseconds() {
            return nowMs;
        }

        @Override
        public long nanoseconds() {
            return nowMs * 1_000_000;
        }

        @Override
        public void sleep(long ms) {
            nowMs += ms;
        }

        @Override
        public void waitObject(Object o, Supplier<Boolean> condition, long deadlineMs) {
            throw new UnsupportedOperationException();
        }
    }

    /** Background work on the request's own thread: after each operation whatever is due by the request's clock. */
    private final class Tasks implements Scheduler {
        private record Task(long dueMs, int order, Runnable work) { }

        private final PriorityQueue<Task> waiting =
            new PriorityQueue<>(Comparator.comparingLong(Task::dueMs).thenComparingInt(Task::order));
        private int scheduled;

        @Override
        public void startup() { }

        @Override
        public void shutdown() { }

        @Override
        public ScheduledFuture<?> schedule(String name, Runnable work, long delayMs, long periodMs) {
            // Periodic work (expiring producers) is an operation of its own here.
            if (periodMs < 0) waiting.add(new Task(clock.nowMs + Math.max(delayMs, 0), scheduled++, work));
            return NO_FUTURE;
        }

        @Override
        public void resizeThreadPool(int size) { }

        void run(long untilMs) {
            while (!waiting.isEmpty() && waiting.peek().dueMs <= untilMs) waiting.poll().work.run();
        }
    }

    private static final ScheduledFuture<?> NO_FUTURE = (ScheduledFuture<?>) Proxy.newProxyInstance(
        Log.class.getClassLoader(), new Class<?>[] {ScheduledFuture.class},
        (proxy, method, args) -> method.getReturnType() == boolean.class ? (Object) true
            : method.getReturnType() == long.class ? (Object) 0L
            : method.getReturnType() == int.class ? (Object) 0 : null);

    /** Kafka draws a segment's roll jitter at random; a request states it. */
    private final class Config extends LogConfig {
        Config(Map<String, String> settings) {
            super(settings);
        }

        @Override
        public long randomSegmentJitter() {
            return jitterMs;
        }
    }

    private static final BrokerTopicStats STATS = new BrokerTopicStats();

    private final Clock clock = new Clock();
    private final Tasks tasks = new Tasks();
    private final RequestLocal local = RequestLocal.withThreadConfinedCaching();
    private final Map<String, String> settings = new HashMap<>();
    private final boolean followEnd;
    private final boolean crash;
    private long jitterMs;
    private final UnifiedLog log;

    Log(JsonNode request) throws IOException {
        clock.nowMs = Driver.number(request, "now_ms", 0);
        jitterMs = Driver.number(request, "jitter_ms", 0);
        followEnd = !request.path("hold_high_watermark").asBoolean();
        crash = request.path("crash").asBoolean();
        configure(request.path("config"));
        log = UnifiedLog.create(new File(Driver.required(request, "directory")).getAbsoluteFile(), new Config(settings),
            Driver.number(request, "log_start_offset", 0), Driver.number(request, "recovery_point", 0), tasks, STATS, clock,
            Integer.MAX_VALUE, new ProducerStateManagerConfig((int) Driver.number(request, "producer_id_expiration_ms", 86_400_000), false),
            Integer.MAX_VALUE, new LogDirFailureChannel(8), !request.path("unclean").asBoolean(),
            Optional.ofNullable(Driver.text(request, "topic_id", null)).map(Uuid::fromString));
        tasks.run(clock.nowMs);
        settle();
    }

    static ObjectNode run(JsonNode request) throws IOException {
        ObjectNode answer = Driver.object();
        try (Log log = new Log(request)) {
            answer.set("opened", log.state());
            ArrayNode results = answer.putArray("results");
            for (JsonNode operation : request.path("operations")) {
                ObjectNode result;
                try {
                    result = log.apply(operation);
                    log.tasks.run(log.clock.nowMs);
                    log.settle();
                } catch (Driver.BadRequest e) {
                    throw e;
                } catch (Exception e) {
                    result = Driver.failure(e);
                }
                results.add(result.put("log_end_offset", log.log.logEndOffset()).put("active_segment", log.log.activeSegment().baseOffset()));
            }
            answer.set("closed", log.state());
        }
        return answer;
    }

    private void configure(JsonNode config) {
        config.fields().forEachRemaining(e -> settings.put(e.getKey(), e.getValue().asText()));
        // Kafka refuses less than 1 MiB by its public name.
        String size = settings.get("segment.bytes");
        if (size != null && Long.parseLong(size) < 1 << 20) {
            settings.remove("segment.bytes");
            settings.put(LogConfig.INTERNAL_SEGMENT_BYTES_CONFIG, size);
        } else if (size != null) {
            settings.remove(LogConfig.INTERNAL_SEGMENT_BYTES_CONFIG);
        }
    }

    private void settle() throws IOException {
        if (followEnd) log.updateHighWatermark(log.logEndOffset());
    }

    private ObjectNode apply(JsonNode o) throws IOException {
        ObjectNode result = Driver.object();
        switch (Driver.required(o, "do")) {
            case "append" -> append(o, MemoryRecords.readableRecords(ByteBuffer.wrap(Batches.bytes(o.path("batches")))), result);
            case "append_records" -> append(o, Batches.batch(o), result);
            case "marker" -> {
                MemoryRecords marker = MemoryRecords.withEndTransactionMarker(Driver.number(o, "timestamp_ms", clock.nowMs),
                    Driver.number(o, "producer_id", -1), (short) Driver.number(o, "producer_epoch", -1), Batches.marker(o));
                leader(o, marker, AppendOrigin.COORDINATOR, result);
            }
            case "clock" -> clock.nowMs = Driver.number(o, "now_ms", clock.nowMs);
            case "jitter" -> jitterMs = Driver.number(o, "jitter_ms", 0);
            case "configure" -> {
                configure(o.path("config"));
                log.updateConfig(new Config(settings));
            }
            case "roll" -> {
                if (o.hasNonNull("offset")) log.roll(Optional.of(o.get("offset").asLong()));
                else log.roll();
            }
            case "flush" -> log.flush(true);
            case "truncate" -> result.put("truncated", log.truncateTo(Driver.number(o, "offset", 0)));
            case "truncate_fully" -> log.truncateFullyAndStartAt(Driver.number(o, "offset", 0), Optional.empty());
            case "high_watermark" -> log.updateHighWatermark(Driver.number(o, "offset", log.logEndOffset()));
            case "log_start" -> result.put("advanced", log.maybeIncrementLogStartOffset(
                Driver.number(o, "offset", 0), LogStartOffsetIncrementReason.ClientRecordDeletion));
            case "retain" -> result.put("deleted", log.deleteOldSegments());
            case "leader_epoch" -> log.assignEpochStartOffset((int) Driver.number(o, "leader_epoch", 0), log.logEndOffset());
            case "snapshot" -> log.takeProducerSnapshot();
            case "expire_producers" -> log.removeExpiredProducers(clock.nowMs);
            case "state" -> result.set("state", state());
            case "offset_for_timestamp" -> {
                Optional<FileRecords.TimestampAndOffset> found =
                    log.fetchOffsetByTimestamp(Driver.number(o, "timestamp_ms", 0), Optional.empty()).timestampAndOffsetOpt();
                if (found.isPresent()) result.put("timestamp_ms", found.get().timestamp).put("offset", found.get().offset)
                    .put("leader_epoch", found.get().leaderEpoch.orElse(null));
            }
            case "read" -> read(o, result);
            default -> throw new Driver.BadRequest("unknown operation " + o.path("do"));
        }
        return result;
    }

    private void append(JsonNode o, MemoryRecords records, ObjectNode result) {
        String origin = Driver.text(o, "origin", "client");
        if (origin.equals("replication")) {
            offsets(log.appendAsFollower(records, (int) Driver.number(o, "leader_epoch", 0)), result);
        } else if (o.hasNonNull("as_magic")) {
            offsets(log.appendAsLeaderWithRecordVersion(records, (int) Driver.number(o, "leader_epoch", 0),
                RecordVersion.lookup((byte) o.get("as_magic").asInt())), result);
        } else {
            leader(o, records, AppendOrigin.valueOf(origin.toUpperCase(Locale.ROOT)), result);
        }
    }

    private void leader(JsonNode o, MemoryRecords records, AppendOrigin origin, ObjectNode result) {
        offsets(log.appendAsLeader(records, (int) Driver.number(o, "leader_epoch", 0), origin, local, VerificationGuard.SENTINEL,
            (short) Driver.number(o, "transaction_version", 1)), result);
    }

    private static void offsets(LogAppendInfo info, ObjectNode result) {
        result.put("first_offset", info.firstOffset()).put("last_offset", info.lastOffset())
            .put("max_timestamp_ms", info.maxTimestamp()).put("log_append_time_ms", info.logAppendTime())
            .put("log_start_offset", info.logStartOffset());
    }

    private void read(JsonNode o, ObjectNode result) throws IOException {
        FetchIsolation isolation = switch (Driver.text(o, "isolation", "log_end")) {
            case "log_end" -> FetchIsolation.LOG_END;
            case "high_watermark" -> FetchIsolation.HIGH_WATERMARK;
            case "read_committed" -> FetchIsolation.TXN_COMMITTED;
            default -> throw new Driver.BadRequest("unknown isolation " + o.path("isolation"));
        };
        FetchDataInfo got = log.read(Driver.number(o, "offset", 0), (int) Driver.number(o, "max_bytes", Integer.MAX_VALUE),
            isolation, o.path("min_one").asBoolean(true));
        result.put("offset", got.fetchOffsetMetadata.messageOffset).put("segment", got.fetchOffsetMetadata.segmentBaseOffset)
            .put("position", got.fetchOffsetMetadata.relativePositionInSegment).put("size_bytes", got.records.sizeInBytes())
            .put("first_entry_incomplete", got.firstEntryIncomplete);
        if (got.abortedTransactions.isPresent()) {
            ArrayNode aborted = result.putArray("aborted");
            got.abortedTransactions.get().forEach(t -> aborted.addArray().add(t.producerId()).add(t.firstOffset()));
        }
        if (o.path("bytes").asBoolean()) {
            ByteBuffer bytes = ByteBuffer.allocate(got.records.sizeInBytes());
            if (got.records instanceof FileRecords file) file.readInto(bytes, 0);
            result.put("bytes", bytes.array());
        }
    }

    ObjectNode state() throws IOException {
        ObjectNode out = Driver.object().put("log_start_offset", log.logStartOffset()).put("log_end_offset", log.logEndOffset())
            .put("high_watermark", log.highWatermark()).put("last_stable_offset", log.lastStableOffset())
            .put("recovery_point", log.recoveryPoint());
        ArrayNode segments = out.putArray("segments");
        for (LogSegment s : log.logSegments()) segments.addObject().put("base_offset", s.baseOffset()).put("size_bytes", s.size());
        ArrayNode producers = out.putArray("producers");
        log.producerStateManager().activeProducers().values().stream()
            .sorted(Comparator.comparingLong(ProducerStateEntry::producerId)).forEach(p -> producers.add(producer(p)));
        ArrayNode epochs = out.putArray("leader_epochs");
        log.leaderEpochCache().epochEntries().forEach(e -> epochs.addArray().add(e.epoch()).add(e.startOffset()));
        return out;
    }

    static ObjectNode producer(ProducerStateEntry p) {
        ObjectNode out = Driver.object().put("producer_id", p.producerId()).put("producer_epoch", p.producerEpoch())
            .put("coordinator_epoch", p.coordinatorEpoch()).put("last_timestamp_ms", p.lastTimestamp())
            .put("current_txn_first_offset", p.currentTxnFirstOffset().isPresent() ? p.currentTxnFirstOffset().getAsLong() : null);
        ArrayNode batches = out.putArray("batches");
        p.batchMetadata().forEach(b -> batches.addObject().put("last_sequence", b.lastSeq()).put("last_offset", b.lastOffset())
            .put("offset_delta", b.offsetDelta()).put("timestamp_ms", b.timestamp()));
        return out;
    }

    UnifiedLog unified() {
        return log;
    }

    Time time() {
        return clock;
    }

    /** The clock and the settings a later part of a request asks for. */
    void set(JsonNode question) {
        clock.nowMs = Driver.number(question, "now_ms", clock.nowMs);
        configure(question.path("config"));
        log.updateConfig(new Config(settings));
    }

    void rollAndSettle() throws IOException {
        log.roll();
        settle();
    }

    /** As a broker's clean shutdown: everything flushed and trimmed; or, after a crash, files as they happen to be. */
    @Override
    public void close() {
        try {
            if (crash) {
                log.closeHandlers();
            } else {
                log.flush(true);
                tasks.run(Long.MAX_VALUE);
                log.close();
            }
        } finally {
            log.removeLogMetrics();
            STATS.removeMetrics(log.topicPartition().topic());
        }
    }

    static File[] segments(File directory, String suffix) {
        File[] found = directory.listFiles((d, name) -> name.length() == 20 + suffix.length() && name.endsWith(suffix));
        if (found == null) throw new Driver.BadRequest(directory + " is not a directory");
        Arrays.sort(found);
        return found;
    }

    static void delete(File directory) throws IOException {
        if (directory.exists()) Utils.delete(directory);
    }

    static long size(File directory) {
        long bytes = 0;
        for (File f : segments(directory, ".log")) bytes += f.length();
        return bytes;
    }
}
