package duramen.conformance;

import com.fasterxml.jackson.core.JsonGenerator;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kafka.tools.StorageTool;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

import java.io.BufferedOutputStream;
import java.io.ByteArrayOutputStream;
import java.io.FileOutputStream;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

/** Kafka's stock clients and its storage tool. */
final class Clients {
    private Clients() { }

    static ObjectNode format(JsonNode request) {
        ByteArrayOutputStream text = new ByteArrayOutputStream();
        int code = StorageTool.execute(new String[] {"format", "--standalone", "-t", Uuid.randomUuid().toString(), "-c",
            Driver.required(request, "properties")}, new PrintStream(text, true, StandardCharsets.UTF_8));
        if (code != 0) throw new IllegalStateException("format ended with " + code + ": " + text.toString(StandardCharsets.UTF_8));
        return Driver.object();
    }

    private static Map<String, Object> settings(JsonNode request) {
        Map<String, Object> out = new HashMap<>();
        out.put("bootstrap.servers", Driver.required(request, "bootstrap"));
        request.path("config").fields().forEachRemaining(e -> out.put(e.getKey(), e.getValue().asText()));
        return out;
    }

    private static boolean answers(Admin admin) throws InterruptedException {
        try {
            return !admin.describeCluster().nodes().get(2, TimeUnit.SECONDS).isEmpty();
        } catch (ExecutionException | java.util.concurrent.TimeoutException e) {
            return false;
        }
    }

    /** "ready" says whether the broker answered within "timeout_ms", so that the caller can look at its process in between. */
    static ObjectNode awaitBroker(JsonNode request) throws InterruptedException {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(Driver.number(request, "timeout_ms", 5000));
        Map<String, Object> settings = settings(request);
        settings.put("reconnect.backoff.max.ms", "100");
        Admin admin = Admin.create(settings);
        try {
            boolean ready;
            while (!(ready = answers(admin)) && System.nanoTime() < deadline) Thread.sleep(50);
            return Driver.object().put("ready", ready);
        } finally {
            admin.close(Duration.ZERO); // a plain close waits a minute for the calls nobody answers
        }
    }

    static ObjectNode createTopic(JsonNode request) throws Exception {
        Map<String, String> config = new HashMap<>();
        request.path("topic_config").fields().forEachRemaining(e -> config.put(e.getKey(), e.getValue().asText()));
        NewTopic topic = new NewTopic(Driver.required(request, "topic"), (int) Driver.number(request, "partitions", 1), (short) 1);
        try (Admin admin = Admin.create(settings(request))) {
            return Driver.object().put("topic_id", admin.createTopics(List.of(topic.configs(config))).topicId(topic.name()).get().toString());
        }
    }

    /** Groups of records, each a transaction when the settings name a transactional.id; the offsets of each group. */
    static ObjectNode produce(JsonNode request) throws Exception {
        Map<String, Object> settings = settings(request);
        String topic = Driver.required(request, "topic");
        int partition = (int) Driver.number(request, "partition", 0);
        boolean transactional = settings.containsKey("transactional.id");
        ObjectNode answer = Driver.object();
        ArrayNode offsets = answer.putArray("offsets");
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            if (transactional) producer.initTransactions();
            for (JsonNode group : request.path("groups")) {
                if (transactional) producer.beginTransaction();
                List<Future<RecordMetadata>> sent = new ArrayList<>();
                for (JsonNode r : group.path("records"))
                    sent.add(producer.send(new ProducerRecord<>(topic, partition,
                        r.hasNonNull("timestamp_ms") ? r.get("timestamp_ms").asLong() : null,
                        Batches.bytes(r.path("key")), Batches.bytes(r.path("value")), Arrays.asList(Batches.headers(r.path("headers"))))));
                producer.flush();
                ArrayNode of = offsets.addArray();
                for (Future<RecordMetadata> f : sent) of.add(f.get().offset());
                if (transactional && group.path("abort").asBoolean()) producer.abortTransaction();
                else if (transactional) producer.commitTransaction();
            }
        }
        return answer;
    }

    /** Every record of one partition, from an offset to the end as the isolation level sees it, into the file "out". */
    static ObjectNode consume(JsonNode request) throws Exception {
        Map<String, Object> settings = settings(request);
        settings.putIfAbsent("auto.offset.reset", "none");
        settings.put("enable.auto.commit", "false");
        TopicPartition partition = new TopicPartition(Driver.required(request, "topic"), (int) Driver.number(request, "partition", 0));
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(Driver.number(request, "timeout_ms", 60_000));
        long count = 0;
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
             OutputStream out = new BufferedOutputStream(new FileOutputStream(Driver.required(request, "out")), 1 << 20);
             JsonGenerator json = Driver.JSON.getFactory().createGenerator(out)) {
            json.setRootValueSeparator(null);
            consumer.assign(List.of(partition));
            long start = consumer.beginningOffsets(List.of(partition)).get(partition);
            // A broker that has just started raises the high watermark to the end by itself, but not at once.
            long wanted = Driver.number(request, "await_end_offset", 0), end;
            while ((end = consumer.endOffsets(List.of(partition)).get(partition)) < wanted && System.nanoTime() < deadline) Thread.sleep(50);
            if (end < wanted) throw new IllegalStateException("end offset is " + end + ", not " + wanted);
            consumer.seek(partition, Math.max(start, Driver.number(request, "offset", start)));
            while (consumer.position(partition) < end) {
                if (System.nanoTime() > deadline) throw new IllegalStateException("at offset " + consumer.position(partition) + " of " + end);
                for (ConsumerRecord<byte[], byte[]> r : consumer.poll(Duration.ofMillis(200))) {
                    if (r.offset() >= end) continue;
                    Reader.record(json, r.offset(), r.timestamp(), r.key(), r.value(), r.headers().toArray());
                    json.writeRaw('\n');
                    count++;
                }
            }
            return Driver.object().put("records", count).put("log_start_offset", start).put("end_offset", end);
        }
    }
}
