package duramen.conformance;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.StreamReadConstraints;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.kafka.common.utils.AppInfoParser;
import org.apache.kafka.storage.internals.log.RecordValidationException;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;

/**
 * Serves requests until its input ends: one JSON object a line on stdin, one a line on stdout. The request's "request"
 * field names it; kafka.py documents the others. A failure answers {"error": class, "message": ..., "stack": ...}.
 */
public final class Driver {
    /** Batches arrive as base64 text, longer than Jackson takes by itself. */
    static final ObjectMapper JSON = new ObjectMapper(JsonFactory.builder()
        .streamReadConstraints(StreamReadConstraints.builder().maxStringLength(Integer.MAX_VALUE).build()).build());

    private Driver() { }

    /** The request itself is wrong: never a result of Kafka's code. */
    static final class BadRequest extends RuntimeException {
        BadRequest(String message) {
            super(message);
        }
    }

    public static void main(String[] args) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err); // whatever else prints must not end up between the answers
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = requests.readLine()) != null; ) {
            ObjectNode answer;
            try {
                answer = serve(JSON.readTree(line));
            } catch (Throwable e) {
                answer = failure(e);
            }
            answers.write(JSON.writeValueAsBytes(answer));
            answers.write('\n');
            answers.flush();
        }
        System.exit(0); // the tests are gone; threads that Kafka's classes left behind must not keep this process
    }

    private static ObjectNode serve(JsonNode request) throws Exception {
        return switch (request.path("request").asText()) {
            case "hello" -> object().put("java", System.getProperty("java.version"))
                .put("kafka", AppInfoParser.getVersion());
            case "dump" -> Dump.dump(request);
            case "build_batches" -> Batches.build(request);
            case "append" -> Log.run(request);
            case "read" -> Reader.read(request);
            case "indexes" -> Reader.indexes(request);
            case "clean" -> Cleaning.clean(request);
            case "cleanable" -> Cleaning.cleanable(request);
            case "bench_append" -> Bench.append(request);
            case "bench_iterate" -> Bench.iterate(request);
            case "format" -> Clients.format(request);
            case "await_broker" -> Clients.awaitBroker(request);
            case "create_topic" -> Clients.createTopic(request);
            case "produce" -> Clients.produce(request);
            case "consume" -> Clients.consume(request);
            default -> throw new BadRequest("unknown request " + request.path("request"));
        };
    }

    static ObjectNode object() {
        return JsonNodeFactory.instance.objectNode();
    }

    static ObjectNode failure(Throwable e) {
        StringWriter stack = new StringWriter();
        e.printStackTrace(new PrintWriter(stack));
        Throwable cause = e instanceof RecordValidationException invalid ? invalid.invalidException() : e.getCause();
        return object().put("error", e.getClass().getSimpleName()).put("message", e.getMessage())
            .put("cause", cause == null ? null : cause.getClass().getSimpleName()).put("stack", stack.toString());
    }

    /** A number that may be left out. */
    static long number(JsonNode node, String name, long otherwise) {
        JsonNode value = node.path(name);
        if (value.isMissingNode() || value.isNull()) return otherwise;
        if (!value.canConvertToLong()) throw new BadRequest(name + " is not a number: " + value);
        return value.asLong();
    }

    static String text(JsonNode node, String name, String otherwise) {
        return node.hasNonNull(name) ? node.get(name).asText() : otherwise;
    }

    static String required(JsonNode node, String name) {
        if (!node.hasNonNull(name)) throw new BadRequest("no " + name + " in the request");
        return node.get(name).asText();
    }
}
