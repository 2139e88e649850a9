"""What ``kvs plan`` foretells of one model on one device.

    plan   sizes, whether they fit, rates, the forecast and what else there is     facts   all of it for --json
    text   sections and tables for people                                          plot    the forecast as a picture
"""
