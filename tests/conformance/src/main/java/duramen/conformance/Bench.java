package duramen.conformance;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.FileLogInputStream.FileChannelRecordBatch;
import org.apache.kafka.common.record.internal.FileRecords;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.BufferSupplier;
import org.apache.kafka.common.utils.CloseableIterator;
import org.apache.kafka.common.utils.Utils;
import org.apache.kafka.server.common.RequestLocal;
import org.apache.kafka.storage.internals.log.AppendOrigin;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.log.VerificationGuard;

import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;

/**
 * Times Kafka's own code on one thread: building batches and appending them, and iterating over the records of files.
 * Keys and values come from a file of fixed-width records and are in memory before the clock starts; opening, closing
 * and removing the log are outside the timed part.
 */
final class Bench {
    private Bench() { }

    /** Keys and values of the input file, as the arrays a producer would hand over. */
    private record Input(byte[][] keys, byte[][] values) {
        static Input of(JsonNode request) throws IOException {
            int keyBytes = (int) Driver.number(request, "key_bytes", 10), valueBytes = (int) Driver.number(request, "value_bytes", 100);
            try (FileChannel file = FileChannel.open(Path.of(Driver.required(request, "input")))) {
                int width = keyBytes + valueBytes, count = (int) (file.size() / width);
                if (count == 0 || file.size() % width != 0)
                    throw new Driver.BadRequest("the input is not a whole number of records of " + width + " bytes");
                ByteBuffer all = file.map(FileChannel.MapMode.READ_ONLY, 0, file.size());
                Input input = new Input(new byte[count][keyBytes], new byte[count][valueBytes]);
                for (int i = 0; i < count; i++) all.get(input.keys[i]).get(input.values[i]);
                return input;
            }
        }
    }

    static ObjectNode append(JsonNode request) throws IOException {
        Input input = Input.of(request);
        Compression codec = Batches.codec(request);
        File directory = new File(Driver.required(request, "directory")).getAbsoluteFile();
        long records = Driver.number(request, "records", input.keys.length);
        long startMs = Driver.number(request, "now_ms", 0), perMs = Driver.number(request, "records_per_ms", 1000);
        int batchBytes = (int) Driver.number(request, "batch_bytes", 16 << 10);
        boolean flush = request.path("flush").asBoolean();
        ObjectNode answer = Driver.object();
        ArrayNode seconds = answer.putArray("seconds");
        long batches = 0;
        for (long repetition = Driver.number(request, "repetitions", 1); repetition > 0; repetition--) {
            Log.delete(directory);
            batches = 0;
            try (Log opened = new Log(request)) {
                UnifiedLog log = opened.unified();
                RequestLocal local = RequestLocal.withThreadConfinedCaching();
                ByteBuffer buffer = ByteBuffer.allocate(batchBytes); // used again, as a producer's buffer pool does
                long began = System.nanoTime(), done = 0;
                int next = 0;
                while (done < records) {
                    buffer.clear();
                    MemoryRecordsBuilder builder = MemoryRecords.builder(buffer, RecordBatch.CURRENT_MAGIC_VALUE, codec, TimestampType.CREATE_TIME, 0L);
                    while (done < records) {
                        byte[] key = input.keys[next], value = input.values[next];
                        long timestamp = startMs + done / perMs;
                        if (!builder.hasRoomFor(timestamp, key, value, Record.EMPTY_HEADERS)) break;
                        builder.append(timestamp, key, value);
                        done++;
                        if (++next == input.keys.length) next = 0;
                    }
                    log.appendAsLeader(builder.build(), 0, AppendOrigin.CLIENT, local, VerificationGuard.SENTINEL, (short) 0);
                    batches++;
                }
                if (flush) log.flush(true);
                seconds.add((System.nanoTime() - began) / 1e9);
            }
        }
        return answer.put("records", records).put("batches", batches).put("log_bytes", Log.size(directory));
    }

    /** Every batch's CRC checked, every record's key and value reached; with "copy" also copied out, as a consumer does. */
    static ObjectNode iterate(JsonNode request) throws IOException {
        File directory = new File(Driver.required(request, "directory"));
        ObjectNode answer = Driver.object();
        ArrayNode seconds = answer.putArray("seconds");
        boolean copy = request.path("copy").asBoolean();
        long count = 0, bytes = 0;
        for (long repetition = Driver.number(request, "repetitions", 1); repetition > 0; repetition--) {
            count = 0;
            bytes = 0;
            long began = System.nanoTime();
            try (BufferSupplier buffers = BufferSupplier.create()) {
                for (File file : Log.segments(directory, ".log")) {
                    try (FileRecords records = FileRecords.open(file, false)) {
                        for (FileChannelRecordBatch batch : records.batches()) {
                            batch.ensureValid();
                            try (CloseableIterator<Record> it = batch.streamingIterator(buffers)) {
                                while (it.hasNext()) {
                                    Record record = it.next();
                                    ByteBuffer key = record.key(), value = record.value();
                                    bytes += copy ? copied(key) + copied(value) : size(key) + size(value);
                                    count++;
                                }
                            }
                        }
                    }
                }
            }
            seconds.add((System.nanoTime() - began) / 1e9);
        }
        return answer.put("records", count).put("bytes", bytes).put("log_bytes", Log.size(directory));
    }

    private static byte[] last; // keeps the compiler from leaving the copies out

    private static int size(ByteBuffer buffer) {
        return buffer == null ? 0 : buffer.remaining();
    }

    private static int copied(ByteBuffer buffer) {
        last = Utils.toNullableArray(buffer);
        return last == null ? 0 : last.length;
    }
}
