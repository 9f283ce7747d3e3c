package duramen.conformance;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.DefaultRecordBatch;
import org.apache.kafka.common.record.internal.EndTransactionMarker;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.record.internal.SimpleRecord;
import org.apache.kafka.common.utils.ByteBufferOutputStream;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Locale;

/** Makes batches from their JSON description with Kafka's own builder. */
final class Batches {
    private Batches() { }

    static ObjectNode build(JsonNode request) throws IOException {
        ObjectNode answer = Driver.object();
        ArrayNode out = answer.putArray("batches");
        for (JsonNode spec : request.path("batches")) {
            ByteBuffer bytes = batch(spec).buffer().duplicate();
            byte[] raw = new byte[bytes.remaining()];
            bytes.get(raw);
            out.add(raw);
        }
        return answer;
    }

    static Compression codec(JsonNode spec) {
        String name = Driver.text(spec, "codec", "none");
        if (!spec.hasNonNull("level")) return Compression.of(name).build();
        int level = (int) Driver.number(spec, "level", 0);
        return switch (name) {
            case "gzip" -> Compression.gzip().level(level).build();
            case "lz4" -> Compression.lz4().level(level).build();
            case "zstd" -> Compression.zstd().level(level).build();
            default -> throw new Driver.BadRequest(name + " has no level");
        };
    }

    static MemoryRecords batch(JsonNode spec) throws IOException {
        byte magic = (byte) Driver.number(spec, "magic", RecordBatch.CURRENT_MAGIC_VALUE);
        // as everywhere in Kafka: a v0 batch has no timestamp type
        TimestampType type = magic == RecordBatch.MAGIC_VALUE_V0 ? TimestampType.NO_TIMESTAMP_TYPE
            : TimestampType.forName(Driver.text(spec, "timestamp_type", "CreateTime"));
        long baseOffset = Driver.number(spec, "base_offset", 0);
        long producerId = Driver.number(spec, "producer_id", RecordBatch.NO_PRODUCER_ID);
        short producerEpoch = (short) Driver.number(spec, "producer_epoch", RecordBatch.NO_PRODUCER_EPOCH);
        int sequence = (int) Driver.number(spec, "base_sequence", RecordBatch.NO_SEQUENCE);
        boolean transactional = spec.path("transactional").asBoolean();
        boolean control = spec.path("control").asBoolean() || spec.hasNonNull("marker");
        int leaderEpoch = (int) Driver.number(spec, "leader_epoch", RecordBatch.NO_PARTITION_LEADER_EPOCH);
        if (spec.path("empty").asBoolean()) {
            ByteBuffer header = ByteBuffer.allocate(DefaultRecordBatch.RECORD_BATCH_OVERHEAD);
            DefaultRecordBatch.writeEmptyHeader(header, magic, producerId, producerEpoch, sequence, baseOffset,
                Driver.number(spec, "last_offset", baseOffset), leaderEpoch, type,
                Driver.number(spec, "max_timestamp_ms", RecordBatch.NO_TIMESTAMP), transactional, control);
            header.flip();
            return MemoryRecords.readableRecords(header);
        }
        MemoryRecordsBuilder builder = new MemoryRecordsBuilder(new ByteBufferOutputStream(1024), magic, codec(spec), type,
            baseOffset, Driver.number(spec, "log_append_time_ms", RecordBatch.NO_TIMESTAMP), producerId, producerEpoch, sequence,
            transactional, control, leaderEpoch, Integer.MAX_VALUE, Driver.number(spec, "delete_horizon_ms", RecordBatch.NO_TIMESTAMP));
        if (spec.hasNonNull("marker")) {
            JsonNode marker = spec.get("marker");
            builder.appendEndTxnMarker(Driver.number(marker, "timestamp_ms", RecordBatch.NO_TIMESTAMP), marker(marker));
        }
        long next = baseOffset;
        for (JsonNode record : spec.path("records")) {
            long offset = Driver.number(record, "offset", next);
            SimpleRecord simple = new SimpleRecord(Driver.number(record, "timestamp_ms", RecordBatch.NO_TIMESTAMP),
                bytes(record.path("key")), bytes(record.path("value")), headers(record.path("headers")));
            if (control) builder.appendControlRecordWithOffset(offset, simple);
            else builder.appendWithOffset(offset, simple);
            next = offset + 1;
        }
        if (spec.hasNonNull("last_offset")) builder.overrideLastOffset(spec.get("last_offset").asLong());
        MemoryRecords built = builder.build();
        // what a leader does to a batch that it appends to a LogAppendTime topic
        if (spec.hasNonNull("stamp_append_time_ms"))
            built.batches().forEach(b -> b.setMaxTimestamp(TimestampType.LOG_APPEND_TIME, spec.get("stamp_append_time_ms").asLong()));
        return built;
    }

    static EndTransactionMarker marker(JsonNode spec) {
        return new EndTransactionMarker(ControlRecordType.valueOf(Driver.required(spec, "type").toUpperCase(Locale.ROOT)),
            (int) Driver.number(spec, "coordinator_epoch", 0));
    }

    /** Base64 text, or null. */
    static byte[] bytes(JsonNode node) throws IOException {
        return node.isMissingNode() || node.isNull() ? null : node.binaryValue();
    }

    static Header[] headers(JsonNode node) throws IOException {
        Header[] out = new Header[node.size()];
        for (int i = 0; i < out.length; i++) out[i] = new RecordHeader(node.get(i).get(0).asText(), bytes(node.get(i).get(1)));
        return out;
    }
}
