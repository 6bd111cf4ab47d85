//! Columns.

use serde_json::Value;

/// Rows of facts, as columns with a title each, as wide as their widest cell.
pub fn table(rows: &[Value], columns: &[(&str, &str)]) -> String {
    let cell = |row: &Value, key: &str| match &row[key] {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        number if key.ends_with("_bytes") => mebibytes(number.as_u64().unwrap_or(0)),
        other => other.to_string(),
    };
    let mut lines: Vec<Vec<String>> = vec![columns.iter().map(|(_, title)| (*title).to_owned()).collect()];
    lines.extend(rows.iter().map(|row| columns.iter().map(|(key, _)| cell(row, key)).collect()));
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells: Vec<String> =
            std::iter::zip(&line, &widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        text += &format!("  {}\n", cells.join("  ").trim_end());
    }
    text
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [
            json!({"arch": "sm_61", "ptx_bytes": 1572864, "ok": true}),
            json!({"arch": "longer…", "ptx_bytes": 0, "ok": null}),
        ];
        let got = table(&rows, &[("arch", "floor"), ("ptx_bytes", "PTX"), ("ok", "ok")]);
        let want = "  floor    PTX      ok\n  sm_61    1.5 MiB  yes\n  longer…  0.0 MiB  –\n";
        assert_eq!(got, want);
    }
}
