package duramen.conformance;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.kafka.common.utils.Exit;
import org.apache.kafka.tools.DumpLogSegments;

import java.io.ByteArrayOutputStream;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.regex.Pattern;

/** Runs Kafka's DumpLogSegments in this process and returns what it printed. */
final class Dump {
    private Dump() { }

    private static final class Exited extends RuntimeException {
        final int code;

        Exited(int code, String message) {
            super("exit " + code + (message == null ? "" : ": " + message));
            this.code = code;
        }
    }

    /** Keeps only the lines in which the pattern is found: a dump of a large log is a large text. */
    private static final class Matching extends OutputStream {
        private final ByteArrayOutputStream line = new ByteArrayOutputStream();
        private final StringBuilder kept = new StringBuilder();
        private final Pattern pattern;

        Matching(Pattern pattern) {
            this.pattern = pattern;
        }

        @Override
        public void write(int b) {
            line.write(b);
            if (b == '\n') end();
        }

        @Override
        public void write(byte[] bytes, int from, int count) {
            for (int i = from, start = from; i < from + count; i++) {
                if (bytes[i] != '\n' && i + 1 < from + count) continue;
                line.write(bytes, start, i + 1 - start);
                start = i + 1;
                if (bytes[i] == '\n') end();
            }
        }

        private void end() {
            String text = line.toString(StandardCharsets.UTF_8);
            if (pattern == null || pattern.matcher(text).find()) kept.append(text);
            line.reset();
        }

        String text() {
            if (line.size() > 0) end();
            return kept.toString();
        }
    }

    static ObjectNode dump(JsonNode request) {
        List<String> args = new ArrayList<>();
        request.path("args").forEach(arg -> args.add(arg.asText()));
        String matching = Driver.text(request, "matching", null);
        Matching out = new Matching(matching == null ? null : Pattern.compile(matching));
        Matching err = new Matching(null);
        PrintStream outBefore = System.out, errBefore = System.err;
        ObjectNode answer = Driver.object();
        int code = 0;
        Exit.setExitProcedure((status, message) -> {
            throw new Exited(status, message);
        });
        try (PrintStream o = new PrintStream(out, false, StandardCharsets.UTF_8);
             PrintStream e = new PrintStream(err, false, StandardCharsets.UTF_8)) {
            System.setOut(o);
            System.setErr(e);
            try {
                DumpLogSegments.main(args.toArray(new String[0]));
            } catch (Exited exited) {
                code = exited.code;
            } catch (Throwable t) { // what a process of its own would print before it ends with 1
                code = 1;
                t.printStackTrace(e);
            }
        } finally {
            System.setOut(outBefore);
            System.setErr(errBefore);
            Exit.resetExitProcedure();
        }
        return answer.put("exit", code).put("out", out.text()).put("err", err.text());
    }
}
