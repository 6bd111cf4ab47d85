//! Counts as Prometheus reads them.

use std::fmt::Display;

use crate::engine::Counts;

/// In the text format, version 0.0.4.
pub fn text(counts: &Counts) -> String {
    let mut text = String::new();
    let mut put = |name: &str, kind: &str, help: &str, values: &[(&str, &dyn Display)]| {
        text += &format!("# HELP serve_{name} {help}\n# TYPE serve_{name} {kind}\n");
        values.iter().for_each(|(label, value)| text += &format!("serve_{name}{label} {value}\n"));
    };
    let Counts { batch, .. } = counts;
    let requests: [(&str, &dyn Display); 4] = [
        ("{outcome=\"stop\"}", &counts.stopped),
        ("{outcome=\"length\"}", &counts.cut),
        ("{outcome=\"cancelled\"}", &counts.cancelled),
        ("{outcome=\"error\"}", &counts.failed),
    ];
    put(
        "requests_total",
        "counter",
        "Requests that have ended, by how; cancelled also by a stop string.",
        &requests,
    );
    let of_first: [(&str, &dyn Display); 2] =
        [("_sum", &counts.first_token_seconds), ("_count", &counts.first_tokens)];
    put("first_token_seconds", "summary", "From a request to its first token.", &of_first);
    let singles: [(&str, &str, &str, &dyn Display); 15] = [
        ("requests_running", "gauge", "Requests in the batch.", &counts.running),
        ("requests_waiting", "gauge", "Requests that wait for a place in it.", &counts.waiting),
        ("prompt_tokens_total", "counter", "Tokens of prompts.", &counts.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens that the model has written.", &counts.new_tokens),
        ("drafted_tokens_total", "counter", "Tokens that were drafted.", &counts.drafted_tokens),
        ("accepted_tokens_total", "counter", "Drafted tokens that were chosen.", &counts.accepted_tokens),
        ("steps_total", "counter", "Forward passes.", &batch.steps),
        ("computed_tokens_total", "counter", "Tokens of all forward passes.", &batch.computed_tokens),
        ("reused_tokens_total", "counter", "Tokens that the prefix cache had.", &batch.reused_tokens),
        ("preemptions_total", "counter", "Requests that lost their pages for a while.", &batch.preemptions),
        ("pages", "gauge", "Pages of the caches.", &batch.pages),
        ("free_pages", "gauge", "Pages that no request holds.", &batch.free_pages),
        ("cached_pages", "gauge", "Free pages that the prefix cache knows.", &batch.cached_pages),
        ("evicted_pages_total", "counter", "Pages that left the prefix cache.", &batch.evicted_pages),
        ("copied_pages_total", "counter", "Pages copied since several held them.", &batch.copied_pages),
    ];
    singles.iter().for_each(|(name, kind, help, value)| put(name, kind, help, &[("", *value)]));
    text
}
