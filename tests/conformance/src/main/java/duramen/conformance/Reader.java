package duramen.conformance;

import com.fasterxml.jackson.core.JsonGenerator;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.record.internal.FileLogInputStream.FileChannelRecordBatch;
import org.apache.kafka.common.record.internal.FileRecords;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.BufferSupplier;
import org.apache.kafka.common.utils.CloseableIterator;
import org.apache.kafka.storage.internals.log.AbortedTxn;
import org.apache.kafka.storage.internals.log.OffsetIndex;
import org.apache.kafka.storage.internals.log.ProducerStateManager;
import org.apache.kafka.storage.internals.log.TimeIndex;
import org.apache.kafka.storage.internals.log.TransactionIndex;

import java.io.BufferedOutputStream;
import java.io.File;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** What Kafka reads from the files of a partition directory; changes nothing there. */
final class Reader {
    private static final long ANY_PRODUCER = RecordBatch.NO_PRODUCER_ID;

    private Reader() { }

    private static final class Output {
        final JsonGenerator json;
        final boolean records;
        final boolean check;
        final Map<Long, List<long[]>> hidden;
        long batches;
        long recordCount;

        Output(JsonGenerator json, JsonNode request, Map<Long, List<long[]>> hidden) {
            this.json = json;
            this.records = request.path("records").asBoolean(true);
            this.check = request.path("check_crc").asBoolean(true);
            this.hidden = hidden;
        }
    }

    /** One JSON line a batch, with its records inside, into the file "out". */
    static ObjectNode read(JsonNode request) throws IOException {
        List<File> files = new ArrayList<>();
        request.path("files").forEach(f -> files.add(new File(f.asText())));
        File directory = request.hasNonNull("directory") ? new File(request.get("directory").asText()) : null;
        if (directory != null) files.addAll(List.of(Log.segments(directory, ".log")));
        boolean committed = request.path("committed").asBoolean();
        if (committed && directory == null) throw new Driver.BadRequest("committed needs a directory");
        try (OutputStream out = new BufferedOutputStream(new FileOutputStream(Driver.required(request, "out")), 1 << 20);
             JsonGenerator json = Driver.JSON.getFactory().createGenerator(out);
             BufferSupplier buffers = BufferSupplier.create()) {
            json.setRootValueSeparator(null);
            Output output = new Output(json, request, committed ? hidden(directory) : Map.of());
            for (File file : files) {
                try (FileRecords records = FileRecords.open(file, false)) {
                    ByteBuffer header = ByteBuffer.allocate(61);
                    for (FileChannelRecordBatch batch : records.batches()) {
                        header.clear().limit(Math.min(61, batch.sizeInBytes()));
                        records.readInto(header, batch.position());
                        write(output, file.getName(), batch.position(), batch, header, buffers);
                    }
                }
            }
            if (request.hasNonNull("bytes")) {
                ByteBuffer bytes = ByteBuffer.wrap(request.get("bytes").binaryValue());
                int position = 0;
                for (RecordBatch batch : MemoryRecords.readableRecords(bytes).batches()) {
                    write(output, null, position, batch, bytes.slice(position, batch.sizeInBytes()), buffers);
                    position += batch.sizeInBytes();
                }
            }
            return Driver.object().put("batches", output.batches).put("records", output.recordCount);
        }
    }

    private static void write(Output o, String file, int position, RecordBatch b, ByteBuffer header, BufferSupplier buffers)
        throws IOException {
        if (o.check) b.ensureValid();
        boolean v2 = b.magic() >= RecordBatch.MAGIC_VALUE_V2;
        JsonGenerator json = o.json;
        o.batches++;
        json.writeStartObject();
        json.writeStringField("file", file);
        json.writeNumberField("position", position);
        json.writeNumberField("size_bytes", b.sizeInBytes());
        json.writeNumberField("base_offset", b.baseOffset());
        json.writeNumberField("last_offset", b.lastOffset());
        if (b.countOrNull() == null) json.writeNullField("count");
        else json.writeNumberField("count", b.countOrNull());
        json.writeNumberField("magic", b.magic());
        json.writeNumberField("crc", b.checksum());
        json.writeNumberField("attributes", v2 ? header.getShort(21) : header.get(17));
        json.writeStringField("codec", b.compressionType().name);
        json.writeStringField("timestamp_type", b.timestampType().name);
        json.writeNumberField("base_timestamp_ms", v2 ? header.getLong(27) : RecordBatch.NO_TIMESTAMP);
        json.writeNumberField("max_timestamp_ms", b.maxTimestamp());
        json.writeNumberField("producer_id", b.producerId());
        json.writeNumberField("producer_epoch", b.producerEpoch());
        json.writeNumberField("base_sequence", b.baseSequence());
        json.writeNumberField("leader_epoch", b.partitionLeaderEpoch());
        json.writeBooleanField("transactional", b.isTransactional());
        json.writeBooleanField("control", b.isControlBatch());
        if (b.deleteHorizonMs().isEmpty()) json.writeNullField("delete_horizon_ms");
        else json.writeNumberField("delete_horizon_ms", b.deleteHorizonMs().getAsLong());
        if (o.records && !isHidden(o.hidden, b)) {
            json.writeArrayFieldStart("records");
            try (CloseableIterator<Record> records = b.streamingIterator(buffers)) {
                while (records.hasNext()) {
                    Record r = records.next();
                    if (o.check) r.ensureValid();
                    o.recordCount++;
                    record(json, r.offset(), r.timestamp(), array(r.key()), array(r.value()), r.headers());
                }
            }
            json.writeEndArray();
        }
        json.writeEndObject();
        json.writeRaw('\n');
    }

    /** [offset, timestamp, key, value, [[name, value], ...]] */
    static void record(JsonGenerator json, long offset, long timestamp, byte[] key, byte[] value, Header[] headers) throws IOException {
        json.writeStartArray();
        json.writeNumber(offset);
        json.writeNumber(timestamp);
        binary(json, key);
        binary(json, value);
        json.writeStartArray();
        for (Header h : headers) {
            json.writeStartArray();
            json.writeString(h.key());
            binary(json, h.value());
            json.writeEndArray();
        }
        json.writeEndArray();
        json.writeEndArray();
    }

    private static void binary(JsonGenerator json, byte[] bytes) throws IOException {
        if (bytes == null) json.writeNull();
        else json.writeBinary(bytes);
    }

    private static byte[] array(ByteBuffer buffer) {
        if (buffer == null) return null;
        byte[] out = new byte[buffer.remaining()];
        buffer.duplicate().get(out);
        return out;
    }

    private static boolean isHidden(Map<Long, List<long[]>> hidden, RecordBatch b) {
        for (long[] range : hidden.getOrDefault(ANY_PRODUCER, List.of())) if (b.baseOffset() >= range[0]) return true;
        if (!b.isTransactional() || b.isControlBatch()) return false;
        for (long[] range : hidden.getOrDefault(b.producerId(), List.of()))
            if (b.baseOffset() >= range[0] && b.baseOffset() <= range[1]) return true;
        return false;
    }

    /** Offset ranges a read_committed consumer does not see, by producer; of any producer from the last stable offset on. */
    private static Map<Long, List<long[]>> hidden(File directory) throws IOException {
        Map<Long, List<long[]>> out = new HashMap<>();
        for (File file : Log.segments(directory, ".txnindex"))
            for (AbortedTxn t : aborted(file))
                out.computeIfAbsent(t.producerId(), k -> new ArrayList<>()).add(new long[] {t.firstOffset(), t.lastOffset()});
        Map<Long, Long> open = new HashMap<>();
        for (File file : Log.segments(directory, ".log"))
            try (FileRecords records = FileRecords.open(file, false)) {
                for (RecordBatch b : records.batches())
                    if (b.isControlBatch()) open.remove(b.producerId());
                    else if (b.isTransactional()) open.putIfAbsent(b.producerId(), b.baseOffset());
            }
        open.values().stream().min(Long::compare).ifPresent(lso -> out.put(ANY_PRODUCER, List.of(new long[] {lso, Long.MAX_VALUE})));
        return out;
    }

    private static Collection<AbortedTxn> aborted(File file) throws IOException {
        try (TransactionIndex index = new TransactionIndex(base(file), file)) {
            return index.allAbortedTxns();
        }
    }

    private static long base(File file) {
        return Long.parseLong(file.getName().substring(0, 20));
    }

    /** Every entry of every index and snapshot file, as Kafka's classes read them. */
    static ObjectNode indexes(JsonNode request) throws IOException {
        File directory = new File(Driver.required(request, "directory"));
        ObjectNode answer = Driver.object();
        ObjectNode files = answer.putObject("files");
        for (File file : Log.segments(directory, ".index")) {
            ArrayNode entries = files.putArray(file.getName());
            if (file.length() == 0) continue; // an empty file cannot be mapped
            try (OffsetIndex index = new OffsetIndex(file, base(file), -1, false)) {
                for (int i = 0; i < index.entries(); i++) entries.addArray().add(index.entry(i).offset()).add(index.entry(i).position());
            }
        }
        for (File file : Log.segments(directory, ".timeindex")) {
            ArrayNode entries = files.putArray(file.getName());
            if (file.length() == 0) continue;
            try (TimeIndex index = new TimeIndex(file, base(file), -1, false)) {
                for (int i = 0; i < index.entries(); i++) entries.addArray().add(index.entry(i).timestamp()).add(index.entry(i).offset());
            }
        }
        for (File file : Log.segments(directory, ".txnindex")) {
            ArrayNode entries = files.putArray(file.getName());
            for (AbortedTxn t : aborted(file))
                entries.addArray().add(t.producerId()).add(t.firstOffset()).add(t.lastOffset()).add(t.lastStableOffset());
        }
        for (File file : Log.segments(directory, ".snapshot")) {
            ArrayNode entries = files.putArray(file.getName());
            ProducerStateManager.readSnapshot(file).forEach(p -> entries.add(Log.producer(p)));
        }
        return answer;
    }
}
